"""One replica as this router sees it, and reservations of room on it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

from engine.contract.messages import LoadReport, WorkerInfo
from engine.contract.role import Role, Work
from router.placement.fleet import Fleet, Standing, prices_of
from router.placement.prompt_share import PromptShare, num_prompt_tokens
from router.roles import role_named

KNOWN_PROMPT_TOKENS = 256
"""A worker that has computed fewer prompt tokens has no prices for them yet; they are priced like output tokens."""


class Replica:
    """The state of one replica. Only its pool and its reservations write it.

    ``reserved_blocks``, ``reserved_tokens`` and ``num_reserved`` belong to requests that were sent there and are not
    yet in its reports. ``role`` is the one that it was started with; ``leaning`` is the role that it prefers now, by
    its reports, and ``leaning_role`` the record of that. ``keeps_to``: the only kind of work that it should take, while
    this router divides the work. ``order``: a number by which every router orders replicas alike.
    ``has_stream``: this router receives its tokens.
    ``is_in_service``: it introduced itself and does not fail. ``takes_requests``: it is in service and does not drain.
    Every choice reads every replica, so these values for policies are precomputed: ``num_blocks``;
    ``num_available_blocks`` (free and not reserved, nor held for requests to come); ``promised_usage`` (share of KV
    blocks in use, reserved, or needed by prompts that wait; can exceed 1); ``queued_tokens`` (prompt tokens that wait
    there or are on their way); ``num_queued`` (the same for requests). In a pool that predicts, ``fleet`` has the
    replica's column at ``slot``.
    """

    __slots__ = (
        "fleet",
        "has_stream",
        "info",
        "is_in_service",
        "is_left_out",
        "keeps_to",
        "leaning",
        "leaning_role",
        "load",
        "num_available_blocks",
        "num_blocks",
        "num_failures",
        "num_queued",
        "num_reserved",
        "num_reserved_rows",
        "on_report",
        "order",
        "probe_at_s",
        "promised_usage",
        "prompt_share",
        "queued_tokens",
        "replica_id",
        "reported_at_s",
        "reserved_blocks",
        "reserved_tokens",
        "role",
        "slot",
        "takes_requests",
    )

    def __init__(self, replica_id: str, *, role: str = "", probe_at_s: float = 0.0) -> None:
        self.replica_id = replica_id
        self.role = self.leaning = role
        self.leaning_role: Role = role_named(role)
        self.info: WorkerInfo | None = None
        self.load = LoadReport()
        self.reported_at_s = 0.0
        self.probe_at_s = probe_at_s
        self.num_failures = 0
        self.is_left_out = False
        self.is_in_service = False
        self.has_stream = False
        self.takes_requests = False
        self.reserved_blocks = 0
        self.reserved_tokens = 0
        self.num_reserved_rows = 0
        self.num_reserved = 0
        self.keeps_to: Work | None = None
        self.order = float(zlib.crc32(replica_id.encode()))
        self.prompt_share = PromptShare()
        self.fleet: Fleet | None = None
        self.slot = 0
        self.on_report: list[Callable[[], None]] = []
        self.update()

    def update(self) -> None:
        """Recompute the values for policies after a change."""
        load = self.load
        self.is_in_service = self.info is not None and not self.is_left_out
        self.takes_requests = self.is_in_service and not load.is_draining
        self.leaning = load.leaning or self.role
        self.leaning_role = role_named(self.leaning)
        self.num_blocks = load.num_blocks
        self.num_available_blocks = load.num_free_blocks + load.num_early_blocks - self.reserved_blocks
        others = max(self._num_waiting_blocks() - self.reserved_blocks, 0)
        num_left = self.num_available_blocks - others
        self.promised_usage = 1.0 - num_left / load.num_blocks if load.num_blocks else 1.0
        self.queued_tokens = load.queued_prefill_tokens + self.reserved_tokens
        self.num_queued = load.num_waiting + load.num_loading + self.num_reserved
        if self.fleet is not None:
            self.fleet.write(self.slot, self._standing())

    def _num_waiting_blocks(self) -> int:
        """Blocks that the waiting prompts will take, including those of other routers: a request takes blocks only when
        it is scheduled, and only its own router knows its reservation."""
        block_size = self.info.block_size if self.info is not None else 0
        return -(-self.load.queued_prefill_tokens // block_size) if block_size else 0

    def _standing(self) -> Standing:
        load, info = self.load, self.info
        block_size = info.block_size if info is not None else 0
        standing = Standing(
            self.num_available_blocks,
            self.is_idle,
            self.queued_tokens - load.deferred_prefill_tokens,
            load.num_decoding + load.num_loading + self.num_reserved_rows,
            load.num_context_tokens + self.reserved_blocks * block_size,
            self.prompt_share.value,
            self.leaning_role.leans_to_prompts,
            *prices_of(load.step_time, has_prompts=num_prompt_tokens(load) >= KNOWN_PROMPT_TOKENS),
            deferred_tokens=load.deferred_prefill_tokens,
            least_prompt_share=self.leaning_role.prompt_share,
            keeps_to=0.0 if self.keeps_to is None else 1.0 if self.keeps_to is Work.STREAM else -1.0,
        )
        if info is None or not info.shared_host or self.fleet is None:
            return standing
        return standing._replace(
            core_gain=standing.core_gain if info.borrows_cores else 0.0,
            own_cores=info.num_own_cores,
            host_cores=info.num_host_cores,
            host=self.fleet.host(self.slot, info.shared_host),
            max_rows=info.max_num_seqs,
            order=self.order,
        )

    def prefers(self, work: Work) -> bool:
        """True if the role that it prefers now is for this kind of work."""
        return work in self.leaning_role.prefers

    def note_leaning(self, role: str) -> None:
        """The replica has accepted an order to lean to another role, before its next report shows it."""
        self.load = replace(self.load, leaning=role)
        self.update()

    def keep_to(self, work: Work | None) -> None:
        """Have it take only one kind of work, or (None) any again."""
        if work is not self.keeps_to:
            self.keeps_to = work
            self.update()

    def report(self, load: LoadReport, now_s: float) -> None:
        """Take a report, which counts the requests that were accepted before it."""
        self.load = load
        self.reported_at_s = now_s
        if self.fleet is not None:
            self.prompt_share.note(load, now_s)
        if self.on_report:
            callbacks, self.on_report = self.on_report, []
            for callback in callbacks:
                callback()
        self.update()

    @property
    def is_idle(self) -> bool:
        """True if nothing occupies it, as far as this router knows; blocks under a lease for a reader also count."""
        return not self.num_reserved and self.load.is_empty


class Reservation:
    """Room on one replica for one request, until the replica's reports show the request.

    The request counts in the replica's queue until the first report after the replica accepted it. It counts in the
    replica's memory until :meth:`release`, because blocks are taken only when the request is scheduled.
    """

    __slots__ = ("_is_queued", "_is_released", "_notify", "num_blocks", "num_rows", "num_tokens", "replica")

    def __init__(
        self, replica: Replica, *, num_blocks: int, num_tokens: int, num_rows: int, notify: Callable[[], None]
    ) -> None:
        self._notify = notify
        self._is_released = False
        self._is_queued = True
        self.replica = replica
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        replica.reserved_blocks += num_blocks
        replica.num_reserved_rows += num_rows
        replica.reserved_tokens += num_tokens
        replica.num_reserved += 1
        replica.update()

    def add_tokens(self, num_tokens: int) -> None:
        """Reserve ``num_tokens`` more prompt tokens, which the replica will compute for the request."""
        self.num_tokens += num_tokens
        if self._is_queued:
            self.replica.reserved_tokens += num_tokens
            self.replica.update()

    def accepted(self) -> None:
        """The replica accepted the request: its next report will count it."""
        self.replica.on_report.append(self._leave_queue)

    def release(self) -> None:
        """Release the room. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self._leave_queue()
        self.replica.reserved_blocks -= self.num_blocks
        self.replica.num_reserved_rows -= self.num_rows
        self.replica.update()
        self._notify()

    def _leave_queue(self) -> None:
        if self._is_queued:
            self._is_queued = False
            self.replica.reserved_tokens -= self.num_tokens
            self.replica.num_reserved -= 1
