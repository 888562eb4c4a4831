"""Watches one ``schedule``: a request is preempted by priority only for a request that starts (O2)."""

from __future__ import annotations

from engine.contract.config import SchedulerConfig
from engine.scheduler.requests.request import Request, RequestState
from engine.scheduler.scheduler import Scheduler


class PlaceWatch:
    """Made before ``schedule``, checked after it.

    It says nothing where somebody may lose its place for another reason: without need, as a switch for tests, or
    because running requests lack blocks. While steps are in flight (not ``is_at_rest``) blocks come back later, and who
    they are for starts later.
    """

    def __init__(self, scheduler: Scheduler, config: SchedulerConfig, *, is_at_rest: bool) -> None:
        self._live = scheduler._live_requests.live
        table = scheduler._table
        num_rows = len(table) + table.num_rows_to_come  # those of beams that are laid out in this step among them
        num_lacking = num_rows * table.groups.num_groups  # a row that grows takes a block of each
        if table.beam_rows:
            num_lacking *= 2  # and one that copies its last block takes another
        has_blocks = scheduler.stats().num_free_blocks >= num_lacking
        is_artificial = config.artificial_preemption_probability > 0
        self._is_watching = config.enable_priority_preemption and is_at_rest and has_blocks and not is_artificial
        self._before = {request: (request.state, request.num_preemptions) for request in self._live.values()}

    def check(self) -> None:
        """Check that every victim is outranked by a request that has started to run or load since then."""
        if not self._is_watching:
            return
        victims = [request for request, (_, num) in self._before.items() if request.num_preemptions > num]
        started = [request for request in self._live.values() if self._has_started(request)]
        for victim in victims:
            assert any(other.message.priority < victim.message.priority for other in started), (
                f"{victim.request_id} lost its place to nobody, beside {[other.request_id for other in started]}"
            )

    def _has_started(self, request: Request) -> bool:
        before, now = self._before[request][0], request.state
        is_waiting_before = before is RequestState.WAITING and now in (RequestState.RUNNING, RequestState.LOADING)
        return is_waiting_before or (before is RequestState.READY and now is RequestState.RUNNING)
