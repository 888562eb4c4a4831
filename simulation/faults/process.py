"""The process of a virtual worker: it can be stopped, and go on later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Process:
    """Whether a worker's process runs. What is due while it is stopped is done when it goes on.

    ``is_stopped``: nothing in it runs, as after SIGSTOP. ``is_stuck``: only its engine makes no step, and the rest
    answers. Owners of timers ask ``keeps`` before they do what is due.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_stopped = False
        self.stuck_since_s: float | None = None
        self._runs = asyncio.Event()
        self._runs.set()
        self._kept: dict[Callable[[], object], None] = {}
        self._kept_steps: dict[Callable[[], object], None] = {}

    @property
    def is_stuck(self) -> bool:
        """True while its engine makes no step."""
        return self.stuck_since_s is not None

    @property
    def makes_steps(self) -> bool:
        """True while its engine computes."""
        return not (self.is_stopped or self.is_stuck)

    def keeps(self, action: Callable[[], object]) -> bool:
        """True if the process is stopped; it then calls ``action`` once when it goes on."""
        if self.is_stopped:
            self._kept[action] = None
        return self.is_stopped

    def keeps_step(self, action: Callable[[], object]) -> bool:
        """Like ``keeps``, for what the engine itself does."""
        if self.is_stuck:
            self._kept_steps[action] = None
            return True
        return self.keeps(action)

    async def running(self) -> None:
        """Return when the process runs."""
        while self.is_stopped:
            await self._runs.wait()

    def stop(self) -> None:
        """Stop all of it. Idempotent."""
        self.is_stopped = True
        self._runs.clear()

    def stick(self) -> None:
        """Let its engine make no more steps. Idempotent."""
        if self.stuck_since_s is None:
            self.stuck_since_s = self._loop.time()

    def go_on(self) -> None:
        """Do what waited, in the order in which it was due, and run from now on. Idempotent."""
        self.is_stopped, self.stuck_since_s = False, None
        self._runs.set()
        kept, self._kept, self._kept_steps = {**self._kept, **self._kept_steps}, {}, {}
        for action in kept:
            self._loop.call_soon(action)
