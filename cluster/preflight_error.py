"""What keeps a command from its work, found before anything was started."""

from __future__ import annotations


class PreflightError(Exception):
    """Something outside of the configuration: one line that says what to change."""
