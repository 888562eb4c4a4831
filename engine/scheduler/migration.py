"""Live requests leave for another engine and take their KV along: all of them in a drain, or those that were ordered
to. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.contract.messages import FinishReason
from engine.contract.stats import Counters
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.request import Request, RequestState
from engine.scheduler.requests.row_table import RowTable
from kv_transfer.cache_groups import has_window


class Migration:
    """Ends requests with a hand-over of all KV that was computed for them.

    A running request's blocks stay under a lease until the next engine has read them. A waiting request holds nothing,
    and passes on the hand-over that it came with, if any; tokens that it lost by preemption are computed again, and
    counted here. A loading request leaves only once it runs: the KV on its way here would be lost. A request that hands
    over after its first token anyway is not moved once it has begun.
    """

    def __init__(self, *, table: RowTable, live_requests: LiveRequests, remote: RemoteKV, counters: Counters) -> None:
        self._table = table
        self._live_requests = live_requests
        self._remote = remote
        self._counters = counters
        self.ordered: list[Request] = []
        """Requests that leave as soon as they can. To be read only."""

    def order(self, request_ids: Iterable[str], *, only_waiting: bool = False) -> None:
        """Have requests leave as soon as they can. With ``only_waiting`` the waiting ones leave now, and no others do.

        Ids of requests that are not here are counted and ignored.
        """
        self.ordered = [request for request in self.ordered if not request.is_finished]
        for request_id in request_ids:
            request = self._live_requests.live.get(request_id)
            if request is None:
                self._counters.num_unknown_ids += 1
            elif only_waiting:
                if request.state is RequestState.WAITING:
                    self._let_go((request,))
            elif not request.message.hand_over and request not in self.ordered:
                self.ordered.append(request)

    @property
    def is_due(self) -> bool:
        """True when a request that was ordered to leave can go once no step is in flight."""
        return any(map(_can_go, self.ordered))

    def run_ordered(self) -> int:
        """End the ordered requests that can go now. Call it between steps, when none is in flight.

        Returns:
            How many requests left.
        """
        ordered = self.ordered
        self.ordered = [request for request in ordered if not (_can_go(request) or request.is_finished)]
        return self._let_go([request for request in ordered if _can_go(request)])

    def run(self) -> int:
        """End every request that can go now. Call it between steps, when none is in flight.

        Returns:
            How many requests left.
        """
        return self._let_go([request for request in self._live_requests.live.values() if _can_go(request)])

    def _let_go(self, leaving: Iterable[Request]) -> int:
        num_left = 0
        for request in leaving:
            num_left += 1
            if request.row is not None:
                self._hand_over(request)
                continue
            params = self._remote.pass_on(request)
            if params is None:
                self._counters.recomputed_tokens += request.num_preempted_tokens
            self._live_requests.finish(request)
            self._live_requests.report(request, FinishReason.HANDED_OVER, kv_transfer=params)
        self._counters.num_moved_out += num_left
        return num_left

    def _hand_over(self, request: Request) -> None:
        assert request.row is not None
        num_tokens = int(self._table.num_computed[request.row])
        has_kv = num_tokens > 0
        if request.beams is not None:
            # The search begins anew elsewhere, after the prompt, which is computed again where a window left it.
            num_tokens = min(num_tokens, request.num_prompt_tokens)
            tables = self._table.block_tables(request.row)
            has_kv = has_kv and has_window(self._table.groups, tables, num_tokens - 1)
        if not has_kv or request.num_prompt_logprobs is not None:
            # Cached KV has no logits: the engine that tells a prompt's log-probabilities computes all of it.
            self._counters.recomputed_tokens += num_tokens
            self._live_requests.finish(request)
            self._live_requests.report(request, FinishReason.HANDED_OVER)
            return
        params = self._live_requests.hand_over(request, num_tokens=num_tokens)
        self._live_requests.report(request, FinishReason.HANDED_OVER, kv_transfer=params)


def _can_go(request: Request) -> bool:
    """True for a running or waiting request. A load that is on its way here would be lost."""
    return request.state in (RequestState.RUNNING, RequestState.WAITING)
