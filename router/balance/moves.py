"""The choice of streams that should leave a worker, and of where they go: pure functions of what is known of both.

Several routers come to their choices alone. Each moves its own streams only, of what a worker has too much its share,
which is that of the worker's requests, and fills of other workers' room its share of what has to find room: so all
together move no more than one could who knew everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel, StepWork
from router.balance.streams import MoveReason

HOP_S = 0.02
"""What a move costs besides copying: an order, a request, and the start of a read."""

MARGIN = 0.1
"""A worker takes streams while it keeps its promise by so much of it, and lets some go once it breaks it."""

KV_RELIEF = 0.05
"""A worker that is too full lets streams go until so much less of its KV is in use than it may."""

KV_ROOM = 0.15
"""A worker takes streams while so much less of its KV is in use than may be."""

MIN_TOKENS_LEFT = 32
"""A stream that ends before so many tokens frees its worker by that."""

MAX_TOKENS_LEFT = 1024
"""More tokens to come than this make a move no more worth while: few answers use their whole limit."""

MAX_ERROR = 0.5
"""A model of step times that is wrong by more than this share of them predicts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as a router knows it. ``num_rows`` decode, or soon will, over ``num_context_tokens`` all together.

    ``num_requests`` are everybody's there, in whatever state. ``num_used_blocks`` are not free, or promised.
    ``token_move_s``: how long the KV of a token takes on its way to another worker. ``lends_to``: the host whose other
    workers compute with its cores while it is idle; empty: none do.
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
        """True when its steps can be predicted."""
        return self.step_time.num_steps > 0 and self.step_time.error <= MAX_ERROR

    @property
    def gap_s(self) -> float:
        """Predicted time between two tokens of a stream; prompts in between take what the promise leaves."""
        return self.step_time.seconds(StepWork(num_rows=self.num_rows, num_context_tokens=self.num_context_tokens))

    @property
    def usage(self) -> float:
        """Share of the KV blocks in use or promised."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 1.0

    def with_rows(self, number: int, *, num_tokens: float) -> WorkerState:
        """With a stream of so many tokens more (1), or less (-1)."""
        return replace(
            self,
            num_rows=self.num_rows + number,
            num_context_tokens=self.num_context_tokens + number * num_tokens,
            num_used_blocks=self.num_used_blocks + number * self.blocks_for(num_tokens),
        )

    def blocks_for(self, num_tokens: float) -> float:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size) if self.block_size else 0.0

    def row_s(self, num_tokens: float) -> float:
        """What a stream of so many tokens adds to every step."""
        return self.step_time.row_s + self.step_time.context_token_s * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream of this router. ``itl_s`` is what it was promised between tokens; None: nothing.

    ``may_move``: it has been at its worker for long enough, and was not moved too often.
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
    """``max_usage``: share of its KV blocks above which a worker is too full. ``num_moves`` in all, at most
    ``num_moves_a_worker`` away from one worker and as many towards one."""

    max_usage: float
    num_moves: int
    num_moves_a_worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What a worker has too much of: seconds a step (``GAP``), or blocks (``KV``)."""

    reason: MoveReason
    excess: float


def trouble_of(worker: WorkerState, *, itl_s: float | None, max_usage: float) -> Trouble | None:
    """Why streams should leave a worker whose strictest promise is ``itl_s``; None when they need not."""
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
    """The moves that should begin now. Workers that are ``resting`` neither give nor take.

    ``draw`` gives numbers between 0 and 1: whether a router moves a stream of which only a part is its share.
    """
    return _Plan(workers, streams, limits, resting, draw).run()


@dataclass(slots=True)
class _Room:
    """What one worker may take from this router: a share of its room as it was before. It took ``taken_s`` a step."""

    num_left: int
    blocks: float
    share: float
    gap_s: float
    taken_s: float = 0.0


@dataclass(slots=True)
class _Plan:
    """One round of choices."""

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
        """Relieve the workers in trouble, those that are too full first, then those that are slowest."""
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
        """With other routers beside, half of this one's share: what they move now is in nobody's report yet."""
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
        """The worker that would keep its promise best; None where none would."""
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
        """True for an idle worker with whose cores the other one computes: that would be slower still."""
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
    """What a stream takes of what its worker has too little of."""
    if reason is MoveReason.KV:
        return worker.blocks_for(stream.num_tokens)
    return worker.row_s(stream.num_tokens)


def _worth(worker: WorkerState, stream: StreamState, reason: MoveReason) -> float:
    """What a move gains over the rest of a stream for each second that it costs."""
    num_left = min(stream.num_tokens_left, MAX_TOKENS_LEFT)
    gain = stream.num_tokens + num_left if reason is MoveReason.KV else worker.row_s(stream.num_tokens) * num_left
    return gain / (HOP_S + stream.num_tokens * worker.token_move_s)
