"""Finds clients that read what waits for them so slowly that they would keep it, and their connection, for ever."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections import deque
from dataclasses import dataclass
from typing import Final

NUM_PERIODS: Final = 5
"""A client is judged by so many periods together: a mobile line stands still for a while, and goes on."""

WHOLE_S: Final = 3600.0
"""All that waits must be read fast enough to be read within this time, so that large answers do not wait for days."""

UNSENT_BYTES: Final = 64 * 1024
"""How much the kernel takes of what it cannot send yet. It would take megabytes, and ask for more only once a large
part of that is read: then a slow client seems to read nothing for minutes."""

_TCP_NOTSENT_LOWAT: Final = 25
_ACKED_AT: Final = 120
"""Where TCP_INFO has the number of bytes that the client's system has acknowledged (Linux 4.1)."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a connection has sent: ``num_acked`` bytes have arrived, and ``num_waiting`` more have been written."""

    num_acked: int
    num_waiting: int

    @property
    def end(self) -> int:
        """The position behind all that was written."""
        return self.num_acked + self.num_waiting


class ReadPace:
    """Judges one client, which is looked at once a period.

    Only what waits is judged. Whoever has read by the next look what waited at the last one is never too slow, however
    little that was: such clients read a stream as it comes. Any other must read ``min_bytes_per_s``, on average over
    ``NUM_PERIODS`` periods in a row, or what waits within ``WHOLE_S``, whichever is more.

    Source: ASP.NET Core's Kestrel, ``MinResponseDataRate``, which allows 240 bytes a second and 5 s of grace.
    """

    def __init__(self, *, min_bytes_per_s: float, period_s: float) -> None:
        self._min_bytes_per_s, self._period_s = min_bytes_per_s, period_s
        self._looks: deque[Sent] = deque(maxlen=NUM_PERIODS + 1)

    def has_read_all(self) -> None:
        """Nothing waits now."""
        self._looks.clear()

    def is_too_slow(self, sent: Sent) -> bool:
        """Take a look at what was sent by now; true if the client has been too slow for ``NUM_PERIODS`` periods."""
        looks = self._looks
        if looks and sent.num_acked >= looks[-1].end:
            looks.clear()
        looks.append(sent)
        if len(looks) <= NUM_PERIODS:
            return False
        needed_per_s = max(self._min_bytes_per_s, sent.num_waiting / WHOLE_S)
        return sent.num_acked - looks[0].num_acked < needed_per_s * self._period_s * NUM_PERIODS


def let_kernel_ask_early(peer: socket.socket) -> None:
    """Have the kernel take little of what it cannot send yet, so that what is read shows soon in what is left here."""
    peer.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def sent_by(peer: socket.socket, *, num_buffered: int) -> Sent:
    """What a TCP connection has sent, besides ``num_buffered`` bytes that this process still holds.

    Raises:
        OSError: The connection is closed.
    """
    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
    (num_acked,) = struct.unpack_from("=Q", info, _ACKED_AT)
    (num_in_kernel,) = struct.unpack("i", fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, bytes(4)))
    return Sent(num_acked, num_in_kernel + num_buffered)
