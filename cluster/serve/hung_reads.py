"""A worker one of whose reads hangs for good goes by itself: only the end of its process is sure to end the read.

Nothing less is. With NIXL over TCP neither releasing the transfer nor removing the peer nor deregistering the memory
stopped the bytes on their way. Destroying the agent does, but breaks every other transfer, and the peer that hangs
ended in UCX (`Fatal: unexpected error: Endpoint timeout`) as soon as it went on, in 6 of 6 trials. It does so too when
our process ends, in 6 of 6: so the requests are moved to others first, and then the process ends as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from engine.contract.errors import ReadHangsError

logger = logging.getLogger(f"baton.{__name__}")

LOOK_PERIOD_S = 0.5
END_MARGIN_S = 15.0
"""What a process that was drained may need to end."""


class HungReads:
    """Watches one worker's reads. ``leave`` begins its drain, after which it ends; ``may_leave`` asks whose turn it is.

    Where several workers of a role want to go, as when a network swallows everything, one goes after the other; none
    waits for its turn longer than ``patience_s``, which is also the time that a drain may take. A read that ends by
    itself before that leaves the worker where it is.
    """

    def __init__(
        self,
        *,
        has_hung_read: Callable[[], bool],
        may_leave: Callable[[], Awaitable[bool]],
        leave: Callable[[], object],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_hung_read = has_hung_read
        self._may_leave = may_leave
        self._leave = leave
        self._patience_s = patience_s
        self._clock = clock
        self._since_s: float | None = None
        self._is_leaving = False

    async def keep_looking(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # whatever Serve's list does must not end the watch
                logger.exception("looking for hung reads failed")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Leave if a read hangs and it is our turn."""
        if not self._has_hung_read():
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = self._clock()
            logger.error("a read hangs: this worker moves its requests to others and ends")
        if self._is_leaving:
            return
        if self._hung_s >= self._patience_s or await self._may_leave():
            self._is_leaving = True
            self._leave()

    def check_health(self) -> None:
        """Do nothing unless the worker should have gone long ago.

        Raises:
            ReadHangsError: It should, and is to be replaced as it is.
        """
        if self._hung_s > 2 * self._patience_s + END_MARGIN_S:
            raise ReadHangsError(hung_s=self._hung_s)

    @property
    def _hung_s(self) -> float:
        return 0.0 if self._since_s is None else self._clock() - self._since_s
