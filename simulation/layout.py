"""The layout of a virtual cluster: its pools of workers, and the settings of workers and routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from engine.contract.config import SchedulerConfig
from engine.contract.promise import NO_PROMISE, Promise
from router.roles.mixed import MIXED
from router.settings import RouterSettings
from simulation.machine import Machine

EVERY_PROMPT = 1 << 20
"""``local_prefill_tokens`` for a cluster in which decode workers compute all prompts."""

NO_BOUND = 1 << 20
ROUTER = RouterSettings(
    max_num_requests=NO_BOUND, max_num_queued=NO_BOUND, default_timeout_s=3600.0, max_write_delay_s=0.0, roles="fixed"
)
"""Routers that refuse no request, so that overload shows in the times. They write each token at once: it is assumed
that there are enough routers for that.
"""

LARGE_CHUNK = SchedulerConfig().max_num_batched_tokens
MAX_NUM_SEQS = SchedulerConfig().max_num_seqs
MAX_NUM_WAITING = SchedulerConfig().max_num_waiting
SMALL_CHUNK = 128
REPORTING_WORKERS = 16
"""Up to this many workers report as often as deployed ones."""

MAX_REPORT_FACTOR = 4.0
MAX_JUMP = 4096
"""The most decode steps that are simulated as one."""


class LayoutError(ValueError):
    """A layout that cannot serve requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The workers of one role. ``chunk`` is the most tokens that a step computes.

    ``jump`` is the most decode steps that are simulated as one, if nothing can change between them. It affects only the
    simulation's duration, not its result.
    ``tells_cache``: whether the prefix cache of these workers could affect where requests go. ``max_num_waiting``: a
    worker refuses requests while so many wait there.
    """

    num_workers: int
    machine: Machine
    chunk: int = LARGE_CHUNK
    jump: int = MAX_JUMP
    tells_cache: bool = True
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_waiting: int = MAX_NUM_WAITING

    @property
    def most_running(self) -> int:
        """The most requests that a worker runs at a time."""
        return min(self.chunk, self.max_num_seqs)

    def scheduler(self, *, tells_cache: bool) -> SchedulerConfig:
        """The settings of each worker's scheduler. ``tells_cache``: routers mirror its prefix cache."""
        return SchedulerConfig(
            max_num_batched_tokens=self.chunk,
            max_num_seqs=self.most_running,
            max_num_waiting=self.max_num_waiting,
            enable_cache_events=tells_cache and self.tells_cache,
            max_decode_steps=self.jump,
            cuts_decode_steps=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A cluster: the pools of workers, their machines, the number of routers, and what the routers promise. ``others``
    are pools of further roles, by the role's name.
    """

    name: str
    prefill: Pool
    decode: Pool
    others: Mapping[str, Pool] = field(default_factory=dict)
    settings: RouterSettings = field(default=ROUTER)
    num_routers: int = 1
    streamed: bool = True
    promise: Promise = NO_PROMISE

    def __post_init__(self) -> None:
        if self.decode.num_workers < 1 or self.prefill.num_workers < 0 or self.num_routers < 1:
            raise LayoutError(
                f"{self.name}: {self.prefill.num_workers} prefill and {self.decode.num_workers} decode workers behind "
                f"{self.num_routers} routers: there must be at least one decode worker and one router"
            )

    @property
    def num_workers(self) -> int:
        """The number of all workers."""
        return sum(pool.num_workers for pool in self.pools.values())

    @property
    def pools(self) -> Mapping[str, Pool]:
        """All pools, by the names of their roles."""
        return {"prefill": self.prefill, "decode": self.decode, **self.others}

    def with_pools(self, change: Callable[[Pool], Pool]) -> Layout:
        """The layout with every pool changed."""
        others = {role: change(pool) for role, pool in self.others.items()}
        return replace(self, prefill=change(self.prefill), decode=change(self.decode), others=others)

    @property
    def machine(self) -> Machine:
        """What the machines of all pools have in common: the model, and its routers."""
        return self.decode.machine


def _router(num_workers: int) -> RouterSettings:
    """Router settings. In large clusters idle workers report less often, since nothing depends on these reports."""
    late = min(max(1.0, num_workers / REPORTING_WORKERS), MAX_REPORT_FACTOR)
    return replace(ROUTER, report_period_s=late * ROUTER.report_period_s)


def apart(
    num_prefill: int, num_decode: int, machine: Machine, *, num_mixed: int = 0, chunk: int = LARGE_CHUNK
) -> Layout:
    """A layout of workers that only prefill, and others that only decode; ``num_mixed`` more do both."""
    if num_prefill < 1:
        raise LayoutError("a layout of separate pools needs at least one worker of each kind")
    mixed = {MIXED.name: Pool(num_workers=num_mixed, machine=machine)} if num_mixed else {}
    return Layout(
        name=f"apart_{num_prefill}_{num_decode}" + (f"_{num_mixed}" if num_mixed else ""),
        prefill=Pool(num_workers=num_prefill, machine=machine, chunk=chunk),
        decode=Pool(num_workers=num_decode, machine=machine),
        others=mixed,
        settings=_router(num_prefill + num_decode + num_mixed),
    )


def unified(num_workers: int, machine: Machine, *, chunk: int = LARGE_CHUNK) -> Layout:
    """A layout of workers that prefill and decode their own requests, with ``chunk`` tokens per step."""
    size = "" if chunk == LARGE_CHUNK else f"_chunk_{chunk}"
    return Layout(
        name=f"unified_{num_workers}{size}",
        prefill=Pool(num_workers=0, machine=machine),
        decode=Pool(num_workers=num_workers, machine=machine, chunk=chunk, tells_cache=False),
        settings=replace(_router(num_workers), local_prefill_tokens=EVERY_PROMPT),
    )


def elastic(num_workers: int, machine: Machine, promise: Promise) -> Layout:
    """A layout of workers that take any work, half of which lean to prefill. Requests get a promise."""
    num_prefill = max(1, num_workers // 2)
    return Layout(
        name=f"elastic_{num_workers}",
        prefill=Pool(num_workers=num_prefill, machine=machine),
        decode=Pool(num_workers=num_workers - num_prefill, machine=machine),
        settings=replace(ROUTER, roles="elastic"),
        promise=promise,
    )
