"""Runs programs that nobody has read. See docs/rewards-code.md for what stops what."""
