"""One fake worker: its switches, and what it received."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from engine.contract.messages import GenerateRequest, LoadReport
from router.pool.workers import WorkerUnavailableError


@dataclass(slots=True, kw_only=True, eq=False)
class FakeReplica:
    """The switches of one replica, and what it received.

    ``is_dead`` makes every call fail, ``has_left`` those that were not begun before;
    ``gate`` cleared makes it hang, ``status_gate`` cleared its status as well,
    ``stream_gate`` cleared lets no stream begin,
    ``submit_gate`` cleared makes it accept nothing, ``step_gate`` cleared makes a decode replica report but not step;
    ``abort_gate`` cleared lets aborts come late.
    ``refuse_code`` makes it refuse requests.
    ``lost_loads`` so many hand-overs cannot be read, where the request wants to be told of it.
    ``gauges`` are reported in place of what is.
    ``die_after_tokens`` kills a decode replica once it has produced so many tokens.
    """

    replica_id: str
    num_blocks: int = 1000
    is_dead: bool = False
    has_left: bool = False
    is_stalled: bool = False
    num_peers: int = 1
    refuse_code: str | None = None
    error_code: str | None = None
    die_after_tokens: int | None = None
    num_cached_tokens: int = 0
    lost_loads: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    status_gate: asyncio.Event = field(default_factory=asyncio.Event)
    answer_gate: asyncio.Event = field(default_factory=asyncio.Event)
    stream_gate: asyncio.Event = field(default_factory=asyncio.Event)
    submit_gate: asyncio.Event = field(default_factory=asyncio.Event)
    step_gate: asyncio.Event = field(default_factory=asyncio.Event)
    order_gate: asyncio.Event = field(default_factory=asyncio.Event)
    abort_gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    seen: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    num_tokens: int = 0
    gauges: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()
        self.status_gate.set()
        self.answer_gate.set()
        self.stream_gate.set()
        self.submit_gate.set()
        self.step_gate.set()
        self.order_gate.set()
        self.abort_gate.set()

    def check_alive(self) -> None:
        """Raise the error of a call to a dead actor."""
        if self.is_dead:
            raise WorkerUnavailableError(replica_id=self.replica_id, reason="killed by the test")
        if self.has_left:
            raise WorkerUnavailableError(replica_id=self.replica_id, reason="it has left", was_called=False)

    def held_blocks(self) -> int:
        """Blocks of running and leased requests, at 16 tokens a block."""
        return sum(1 + len(item.prompt_token_ids) // 16 for item in self.running.values()) + len(self.leases)

    def load(self) -> LoadReport:
        """The load report of a real worker in this state."""
        report = LoadReport(
            num_blocks=self.num_blocks,
            num_free_blocks=max(0, self.num_blocks - self.held_blocks()),
            num_running=len(self.running),
            num_leased_blocks=len(self.leases),
            num_held_blocks=self.held_blocks(),
            num_peers=self.num_peers,
            is_stalled=self.is_stalled,
            is_draining=self.refuse_code == "draining",
            counters={"num_generated_tokens": float(self.num_tokens), "num_transfers": 1.0, "num_bytes": 4096.0},
        )
        return replace(report, **self.gauges)
