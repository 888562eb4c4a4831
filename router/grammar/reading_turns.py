"""Turns to read grammars: who waits for one, for how long, and how the API keys share them."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from engine.fair_turns import FairTurns
from router.errors import QueueFullError
from router.key_shares import KeyShares

MAX_NUM_WAITING: Final = 64
"""How many grammars wait for a turn; each may be of 256 KiB."""


class Turn:
    """One turn. Whoever has it gives it back once, when its reading has ended."""

    def __init__(self, turns: ReadingTurns) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun_s = 0.0
        self._turns = turns

    def give_back(self) -> None:
        """Let the next one begin."""
        self._turns.end(self)


class ReadingTurns:
    """``num_places`` turns at a time, by the time that the grammars of each key have taken so far. No key holds all
    turns, nor all waiting places, once there are several keys. Used from one event loop.
    """

    def __init__(self, num_places: int, *, wait_s: float, retry_after_s: float) -> None:
        self._num_places = num_places
        self._wait_s, self._retry_after_s = wait_s, retry_after_s
        self._turns: FairTurns[Turn] = FairTurns(num_places)
        self._places: KeyShares[Turn] = KeyShares(MAX_NUM_WAITING)

    async def take(self, *, owner: str) -> Turn:
        """A turn, once one is free for this owner. If this is cancelled, the waiting place is free again.

        Raises:
            QueueFullError: None was within ``wait_s``, or too many wait already.
        """
        turn = Turn(self)
        num_left = self._places.num_left(owner)
        self._turns.join(turn, owner=owner)
        self._begin()
        if turn.begun.done():
            return turn
        if num_left < 1:
            self._turns.leave(turn)
            raise self._full(f"as many as may wait do so: {self._places.limit_for(1)}")
        self._places.add(turn, owner=owner)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn.begun
        except BaseException as error:
            if not self._turns.leave(turn):
                turn.give_back()
            if isinstance(error, TimeoutError):
                raise self._full("try again later") from None
            raise
        finally:
            self._places.discard(turn)
        return turn

    def end(self, turn: Turn) -> None:
        """Charge a turn's owner for the time that it took, and let the next one begin."""
        self._turns.end(turn, used_s=time.monotonic() - turn.begun_s)
        self._begin()

    def _begin(self) -> None:
        while (turn := self._turns.begin()) is not None:
            turn.begun_s = time.monotonic()
            if not turn.begun.done():
                turn.begun.set_result(None)

    def _full(self, reason: str) -> QueueFullError:
        return QueueFullError(
            f"grammars that take long are being read, at most {self._num_places} at a time; {reason}",
            retry_after_s=self._retry_after_s,
        )
