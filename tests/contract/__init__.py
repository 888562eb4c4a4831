"""One suite for each Protocol, run on every implementation."""
