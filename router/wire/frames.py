"""The format of frames on a socket: the length, the number of the call that the frame belongs to, and the bytes.

Number 0 is the worker's stream. Any other number marks a call to a worker, and the answer with the same number.
"""

from __future__ import annotations

import struct
from typing import Final

LINK_VERSION: Final = 2
"""1: a key, then frames from the worker. 2: numbered frames in both directions."""

MAX_FRAME_BYTES: Final = 1 << 30
STREAM: Final = 0
MAX_CALL_NUMBER: Final = (1 << 32) - 1

_HEADER = struct.Struct("<II")


class FrameTooLongError(Exception):
    """The data is no frame, or the frame is longer than any valid one."""


def framed(frame: bytes, number: int = STREAM) -> bytes:
    """A frame with its header, as it is written to the socket."""
    return _HEADER.pack(len(frame), number) + frame


class FrameParser:
    """Parses numbered frames from bytes that arrive in arbitrary chunks."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now.

        Raises:
            FrameTooLongError: A frame claims to be longer than any valid one.
        """
        rest, size = self._rest, _HEADER.size
        if not rest and len(data) >= size:  # fast path: most often exactly one whole frame arrives
            length, number = _HEADER.unpack_from(data)
            if length + size == len(data) and length <= MAX_FRAME_BYTES:
                return [(number, data[size:])]
        rest += data
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(rest) - start >= size:
            length, number = _HEADER.unpack_from(rest, start)
            if length > MAX_FRAME_BYTES:
                raise FrameTooLongError(f"a frame of {length} bytes")
            end = start + size + length
            if len(rest) < end:
                break
            frames.append((number, bytes(memoryview(rest)[start + size : end])))
            start = end
        if start:
            del rest[:start]
        return frames
