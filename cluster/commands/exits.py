"""How a command ends that could not do its work."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def fail(message: str, code: int) -> int:
    """Print the one line, and return the exit code."""
    print(f"baton: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def output_failed(error: OSError) -> int:
    """Give standard output up because it takes no more, and return the exit code.

    A reader that went away, as in ``baton status | head -1``, is no error to tell of.

    Raises:
        OSError: The same one, if it says something else.
    """
    is_unread = error.errno == errno.EPIPE
    if not is_unread and error.errno not in _NO_ROOM:
        raise error
    with open(os.devnull, "w") as nowhere:  # else Python tries once more at its exit, and complains
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if is_unread:
        return EXIT_FAILURE
    what = error.filename or "the output"
    return fail(f"{what} cannot be written: {error.strerror}", EXIT_FAILURE)
