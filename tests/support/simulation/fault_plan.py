"""A random world as data: a virtual cluster, the requests that it gets, and the faults that happen meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.contract.promise import NO_PROMISE, Promise


class Kind(StrEnum):
    """What happens to a worker, to the connection between a router and a worker, or to a router."""

    KILL = "kill"
    STOP = "stop"
    STICK = "stick"
    DRAIN = "drain"
    DAMAGE_LOADS = "damage_loads"
    RESET_CACHE = "reset_cache"
    LEAN = "lean"
    ADD_WORKER = "add_worker"
    SLOW = "slow"
    LATE_REPORTS = "late_reports"
    SILENCE = "silence"
    CUT = "cut"
    ROUTER_DIES = "router_dies"
    ROUTER_REPLACED = "router_replaced"


LOSES_A_WORKER = frozenset({Kind.KILL, Kind.STOP, Kind.STICK, Kind.SLOW, Kind.LATE_REPORTS, Kind.SILENCE, Kind.CUT})
"""Faults for which a router may give a worker up."""

TAKES_A_WORKER = LOSES_A_WORKER | {Kind.DRAIN}
"""Faults after which, or during which, a worker may take no requests."""

ON_CONNECTIONS = frozenset({Kind.SLOW, Kind.LATE_REPORTS, Kind.SILENCE, Kind.CUT})
ON_ROUTERS = frozenset({Kind.ROUTER_DIES, Kind.ROUTER_REPLACED})


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """``worker`` and ``router`` count the workers and routers of the start; ``router`` None means all connections of
    the worker. The fault ends after ``for_s``; if ``is_replaced``, a killed or drained worker is then replaced, once
    however many faults hit it. ``delay_s`` is how slow a connection becomes.
    """

    kind: Kind
    at_s: float
    worker: int = 0
    router: int | None = None
    for_s: float = 1.0
    delay_s: float = 0.0
    is_replaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``outputs`` are the numbers of tokens of its choices. It is cancelled ``cancel_after_s``, if that is
    not None. Requests of the same ``family`` share the beginning of their prompts.
    """

    at_s: float
    num_prompt: int
    outputs: Sequence[int]
    router: int = 0
    family: int | None = None
    timeout_s: float = 600.0
    cancel_after_s: float | None = None
    session_id: str | None = None
    priority: int = 0
    promise: Promise = NO_PROMISE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """``settings`` change the defaults of routers' settings, ``changed_settings`` those of routers that replace others.
    ``are_links``: calls to a worker stay in order. ``is_warm``: workers have served something before.
    ``share_hosts``: two workers share the cores of a host.
    ``spares``: no fault hits the first worker of each role, so that it could serve every request.
    """

    num_prefill: int
    num_decode: int
    num_routers: int
    num_blocks: int
    chunk: int
    jump: int
    max_num_seqs: int
    max_num_waiting: int
    streamed: bool
    are_links: bool
    is_warm: bool
    share_hosts: bool
    promise: Promise
    settings: Mapping[str, object]
    changed_settings: Mapping[str, object] = field(default_factory=dict)
    asks: Sequence[Ask] = ()
    faults: Sequence[FaultEvent] = ()
    spares: bool = True
    seed: int = 0

    @property
    def num_workers(self) -> int:
        """Workers at the start."""
        return self.num_prefill + self.num_decode
