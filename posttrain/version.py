"""The version, where everything that reports it can read it."""

VERSION = "0.1.0"
