"""How a command ends that could not do its work."""

from __future__ import annotations

import sys

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2


def fail(message: str, code: int) -> int:
    """Print the one line, and return the exit code."""
    print(f"baton: error: {' '.join(message.split())}", file=sys.stderr)
    return code
