"""Runs untrusted programs. docs/rewards-code.md lists which mechanism stops what."""
