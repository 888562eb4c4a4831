"""Protects the sockets with which UCX wakes processes over shared memory from other users of this machine.

UCX gives each agent datagram sockets with abstract names, and every process of the network namespace may send to them.
UCX takes an empty datagram for a connection reset, and ends the process. A kernel filter drops empty datagrams. Any
other datagram only wakes the progress thread once.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26

_LOAD_LENGTH, _JUMP_IF_EQUAL, _RETURN = 0x80, 0x15, 0x06
_DROP, _PASS = 0, 0xFFFFFFFF

_DROP_EMPTY = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (_LOAD_LENGTH, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _PASS),
    )
)
"""Classic BPF, as in linux/filter.h: code, jump if true, jump if false, operand."""

_NUM_INSTRUCTIONS = 4


def drop_empty_wakeups() -> None:
    """Let all datagram sockets of this process with an abstract name drop empty datagrams."""
    program = ctypes.create_string_buffer(_DROP_EMPTY, len(_DROP_EMPTY))
    option = struct.pack("HP", _NUM_INSTRUCTIONS, ctypes.addressof(program))
    for item in _abstract_datagram_sockets():
        item.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _abstract_datagram_sockets() -> Iterator[socket.socket]:
    """One after another, each open until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            descriptor = os.dup(int(name)) if is_socket else None
        except OSError:  # it was closed in the meantime
            continue
        if descriptor is None:
            continue
        with socket.socket(fileno=descriptor) as item:
            if item.family == socket.AF_UNIX and item.type == socket.SOCK_DGRAM and _is_abstract(item.getsockname()):
                yield item


def _is_abstract(address: str | bytes) -> bool:
    return isinstance(address, bytes) and address.startswith(b"\0")
