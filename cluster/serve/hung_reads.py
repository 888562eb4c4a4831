"""A worker with a read that hangs for good ends itself, because only the end of its process is sure to end the read.

Nothing less works. With NIXL over TCP, neither releasing the transfer nor removing the peer nor deregistering memory
stopped the bytes in flight. Destroying the agent does, but it breaks every other transfer. Also, the hanging peer
crashed in UCX (`Fatal: unexpected error: Endpoint timeout`) as soon as it went on, in 6 of 6 trials. It crashes as well
when our process ends, in 6 of 6. So the worker first moves its requests to others, and then ends its process.
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
"""The time that a drained process may need to end."""


class HungReads:
    """Watches one worker's reads. ``leave`` begins the drain that ends the worker; ``may_leave`` asks for its turn.

    If several workers of a role want to leave, as when a network drops all packets, they leave one after the other. No
    worker waits for its turn longer than ``patience_s``, which is also the time that a drain may take. If the read ends
    by itself before the drain begins, the worker stays.
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
        """Look periodically, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # an error in Serve's list of replicas must not end the watch
                logger.exception("checking for hung reads failed")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Leave if a read hangs and it is our turn."""
        if not self._has_hung_read():
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = self._clock()
            logger.error("a read hangs: this worker moves its requests to others and exits")
        if self._is_leaving:
            return
        if self._hung_s >= self._patience_s or await self._may_leave():
            self._is_leaving = True
            self._leave()

    def check_health(self) -> None:
        """Fail if the worker should have ended long ago, so that Serve replaces it.

        Raises:
            ReadHangsError: A read has been hanging for too long.
        """
        if self._hung_s > 2 * self._patience_s + END_MARGIN_S:
            raise ReadHangsError(hung_s=self._hung_s)

    @property
    def _hung_s(self) -> float:
        return 0.0 if self._since_s is None else self._clock() - self._since_s
