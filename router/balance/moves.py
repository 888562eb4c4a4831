"""Chooses streams that should leave a worker, and where they go: pure functions of the state of streams and workers.

Routers choose independently, and each moves only its own streams. It removes its share of a worker's excess: the same
share as it has of the worker's requests. It fills its share of other workers' room: the same share as it has of all
that needs room. So all routers together move no more than one router with full knowledge would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel, StepWork
from router.balance.streams import MoveReason

HOP_S = 0.02
"""Overhead of a move besides copying, in seconds: an order, a request, and the start of a read."""

MARGIN = 0.1
"""A worker takes streams while it keeps its promise with this margin, and gives some away once it breaks it."""

KV_RELIEF = 0.05
"""A worker that is too full gives streams away until its KV usage is this far below the limit."""

KV_ROOM = 0.15
"""A worker takes streams while its KV usage is this far below the limit."""

MIN_TOKENS_LEFT = 32
"""A stream with fewer tokens left is not moved: its end relieves the worker soon."""

MAX_TOKENS_LEFT = 1024
"""More tokens left than this do not add to a move's worth: few answers use their whole limit."""

MAX_ERROR = 0.5
"""A step-time model whose relative error is larger than this is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as a router knows it. ``num_rows`` streams decode or soon will, over ``num_context_tokens`` in sum.

    ``num_requests`` counts all routers' requests there, in any state. ``num_used_blocks`` counts blocks in use or
    promised. ``token_move_s``: time to move the KV of one token to another worker. ``lends_to``: the host whose other
    workers compute with this worker's cores while it is idle; empty: none do.
    """

    replica_id: str
    num_rows: float
    num_context_tokens: float
    num_requests: int
    num_blocks: int
    num_used_blocks: float
    block_size: int
    step_time: StepTimeModel = UNKNOWN_STEP_TIME
    token_move_s: float = 0.0
    lends_to: str = ""

    @property
    def is_known(self) -> bool:
        """True if its steps can be predicted."""
        return self.step_time.num_steps > 0 and self.step_time.error <= MAX_ERROR

    @property
    def gap_s(self) -> float:
        """Predicted time between two tokens of a stream, without prompts, which only use what the promise leaves."""
        return self.step_time.seconds(StepWork(num_rows=self.num_rows, num_context_tokens=self.num_context_tokens))

    @property
    def usage(self) -> float:
        """Share of the KV blocks in use or promised."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 1.0

    def with_rows(self, number: int, *, num_tokens: float) -> WorkerState:
        """The state with one stream of ``num_tokens`` added (1), or removed (-1)."""
        return replace(
            self,
            num_rows=self.num_rows + number,
            num_context_tokens=self.num_context_tokens + number * num_tokens,
            num_used_blocks=self.num_used_blocks + number * self.blocks_for(num_tokens),
        )

    def blocks_for(self, num_tokens: float) -> float:
        """Number of blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size) if self.block_size else 0.0

    def row_s(self, num_tokens: float) -> float:
        """Seconds that a stream of ``num_tokens`` adds to every step."""
        return self.step_time.row_s + self.step_time.context_token_s * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream of this router. ``itl_s`` is its promised inter-token latency; None: no promise.

    ``may_move``: it has been at its worker for long enough, and has not been moved too often.
    """

    request_id: str
    replica_id: str
    num_tokens: int
    num_tokens_left: int
    itl_s: float | None = None
    may_move: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """One stream that should go from ``source`` to ``target``."""

    request_id: str
    source: str
    target: str
    reason: MoveReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """``max_usage``: KV usage above which a worker is too full. ``num_moves`` bounds all moves, ``num_moves_a_worker``
    those from one worker, and those to one worker."""

    max_usage: float
    num_moves: int
    num_moves_a_worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A worker's excess: in seconds a step (``GAP``), or in blocks (``KV``)."""

    reason: MoveReason
    excess: float


def trouble_of(worker: WorkerState, *, itl_s: float | None, max_usage: float) -> Trouble | None:
    """Why streams should leave a worker whose strictest promise is ``itl_s``; None if they need not."""
    if worker.usage >= max_usage:
        excess = (worker.usage - max_usage + KV_RELIEF) * worker.num_blocks
        return Trouble(reason=MoveReason.KV, excess=excess)
    if itl_s is not None and worker.is_known and worker.gap_s > itl_s:
        return Trouble(reason=MoveReason.GAP, excess=worker.gap_s - itl_s)
    return None


def plan_moves(
    workers: Mapping[str, WorkerState],
    streams: Sequence[StreamState],
    *,
    limits: MoveLimits,
    resting: Collection[str] = (),
    draw: Callable[[], float],
) -> list[PlannedMove]:
    """The moves that should begin now. Workers that are ``resting`` neither give nor take streams.

    ``draw`` returns random numbers between 0 and 1. They decide whether a router moves a stream if its share is less
    than a whole stream.
    """
    return _Plan(workers, streams, limits, resting, draw).run()


@dataclass(slots=True)
class _Room:
    """What one worker may take from this router: a share of its initial room. So far it took ``taken_s`` a step."""

    num_left: int
    blocks: float
    share: float
    gap_s: float
    taken_s: float = 0.0


@dataclass(slots=True)
class _Plan:
    """One round of planning."""

    workers: Mapping[str, WorkerState]
    streams: Sequence[StreamState]
    limits: MoveLimits
    resting: Collection[str]
    draw: Callable[[], float]
    own: dict[str, list[StreamState]] = field(default_factory=dict)
    promises: dict[str, float] = field(default_factory=dict)
    rooms: dict[str, _Room] = field(default_factory=dict)
    moves: list[PlannedMove] = field(default_factory=list)

    def run(self) -> list[PlannedMove]:
        """Relieve the workers in trouble: first those that are too full, then the slowest ones."""
        for stream in self.streams:
            self.own.setdefault(stream.replica_id, []).append(stream)
            if stream.itl_s is not None:
                known_s = self.promises.get(stream.replica_id, stream.itl_s)
                self.promises[stream.replica_id] = min(known_s, stream.itl_s)
        troubles = {name: trouble for name in self.own if (trouble := self._trouble(name)) is not None}
        if not troubles:
            return []
        num_requests = sum(self._num_requests(name) for name in troubles)
        share = sum(len(self.own[name]) for name in troubles) / num_requests
        self.rooms = {
            name: self._room(worker, share if share == 1.0 else share / 2)
            for name, worker in self.workers.items()
            if name not in self.resting and name not in troubles
        }
        for name in sorted(troubles, key=lambda name: (troubles[name].reason is not MoveReason.KV, name)):
            if name not in self.resting:
                self._relieve(self.workers[name], troubles[name])
        return self.moves

    def _trouble(self, name: str) -> Trouble | None:
        worker = self.workers.get(name)
        if worker is None:
            return None
        return trouble_of(worker, itl_s=self.promises.get(name), max_usage=self.limits.max_usage)

    def _num_requests(self, name: str) -> int:
        return max(self.workers[name].num_requests, len(self.own[name]))

    def _room(self, worker: WorkerState, share: float) -> _Room:
        """If there are other routers, half of this one's share: no report shows yet what the others move now."""
        blocks = (self.limits.max_usage - KV_ROOM) * worker.num_blocks - worker.num_used_blocks
        return _Room(num_left=self.limits.num_moves_a_worker, blocks=share * blocks, share=share, gap_s=worker.gap_s)

    def _relieve(self, source: WorkerState, trouble: Trouble) -> None:
        name = source.replica_id
        share = len(self.own[name]) / self._num_requests(name)
        left, num_left = share * trouble.excess, self.limits.num_moves_a_worker
        for stream in sorted(self.own[name], key=lambda stream: -_worth(source, stream, trouble.reason)):
            if left <= 0 or not num_left or len(self.moves) >= self.limits.num_moves:
                return
            relief = _relief(source, stream, trouble.reason)
            if not stream.may_move or stream.num_tokens_left < MIN_TOKENS_LEFT or relief <= 0:
                continue
            target = self._target(stream, trouble.reason)
            if target is None:
                continue
            if share < 1.0 and self.draw() * relief >= left:
                return
            self._take(stream, target, trouble.reason)
            left -= relief
            num_left -= 1

    def _target(self, stream: StreamState, reason: MoveReason) -> str | None:
        """The worker that would keep its promise best with the stream; None if none would keep it."""
        best: tuple[float, float, str] | None = None
        for name, room in self.rooms.items():
            after = self.workers[name].with_rows(1, num_tokens=stream.num_tokens)
            promises = [itl_s for itl_s in (self.promises.get(name), stream.itl_s) if itl_s is not None]
            if reason is not MoveReason.KV and self._would_take_cores(name, stream.replica_id):
                continue
            if not self._fits(room, self.workers[name], stream, itl_s=min(promises, default=None), reason=reason):
                continue
            key = (after.gap_s if after.is_known else 0.0, after.usage, name)
            if best is None or key < best:
                best = key
        return best[2] if best is not None else None

    def _would_take_cores(self, target: str, source: str) -> bool:
        """True for an idle target that lends its cores to the source: using it would make the source slower still."""
        host = self.workers[target].lends_to
        return bool(host) and host == self.workers[source].lends_to and not self.workers[target].num_rows

    @staticmethod
    def _fits(
        room: _Room, worker: WorkerState, stream: StreamState, *, itl_s: float | None, reason: MoveReason
    ) -> bool:
        if not room.num_left or room.blocks < worker.blocks_for(stream.num_tokens + MIN_TOKENS_LEFT):
            return False
        if itl_s is None:
            return True
        if not worker.is_known:
            return reason is MoveReason.KV
        seconds = room.share * ((1 - MARGIN) * itl_s - room.gap_s)
        return room.taken_s + worker.row_s(stream.num_tokens) <= seconds

    def _take(self, stream: StreamState, target: str, reason: MoveReason) -> None:
        worker, room = self.workers[target], self.rooms[target]
        self.workers = {**self.workers, target: worker.with_rows(1, num_tokens=stream.num_tokens)}
        room.num_left -= 1
        room.blocks -= worker.blocks_for(stream.num_tokens)
        room.taken_s += worker.row_s(stream.num_tokens)
        if stream.itl_s is not None:
            self.promises[target] = min(self.promises.get(target, stream.itl_s), stream.itl_s)
        self.moves.append(
            PlannedMove(request_id=stream.request_id, source=stream.replica_id, target=target, reason=reason)
        )


def _relief(worker: WorkerState, stream: StreamState, reason: MoveReason) -> float:
    """How much the stream's departure relieves its worker, in the unit of the trouble."""
    if reason is MoveReason.KV:
        return worker.blocks_for(stream.num_tokens)
    return worker.row_s(stream.num_tokens)


def _worth(worker: WorkerState, stream: StreamState, reason: MoveReason) -> float:
    """The gain of a move over the rest of the stream, for each second that the move costs."""
    num_left = min(stream.num_tokens_left, MAX_TOKENS_LEFT)
    gain = stream.num_tokens + num_left if reason is MoveReason.KV else worker.row_s(stream.num_tokens) * num_left
    return gain / (HOP_S + stream.num_tokens * worker.token_move_s)
