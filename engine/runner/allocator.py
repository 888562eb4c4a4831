"""The C library's allocator, told to keep what steps free: they ask for the same again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's names for them, from its malloc.h."""

_TRIM_BYTES = (1 << 31) - 1
_MMAP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Keep up to 2 GiB that this process frees, and let threads that start from now on share one heap.

    A step's tensors come from ``malloc``, and glibc gives large ones back to the system when they are freed: the next
    step gets new pages, each a fault and 4 KiB of zeros: a share of a long prefill that one sees.
    The price: a process stays as large as its largest steps made it.

    Returns:
        False where there is no such allocator; nothing is changed then.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = {_M_TRIM_THRESHOLD: _TRIM_BYTES, _M_MMAP_THRESHOLD: _MMAP_BYTES, _M_ARENA_MAX: 1}
    return all(set_option(option, value) == 1 for option, value in options.items())
