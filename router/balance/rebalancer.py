"""Moves this router's streams away from workers that break their promise, are too full, or are behind with prompts."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from engine.contract.role import Work
from router.balance.moves import HOP_S, MoveLimits, PlannedMove, StreamState, WorkerState, plan_moves
from router.balance.streams import LiveStream, LiveStreams, MoveOrder, MoveReason
from router.balance.waiting_prompts import PromptQueue, WaitingPrompt, may_give, plan_prompt_moves
from router.pool.demand import Demand
from router.pool.replica import Replica
from router.pool.workers import WorkerError, WorkerPool
from router.report.counters import RouterCounters
from router.settings import RouterSettings

logger = logging.getLogger(f"baton.{__name__}")

ORDER_TIMEOUT_S = 30.0
"""How long an order may take. After that it is forgotten, and another stream may be ordered to move."""


class KnownWorkers(Protocol):
    """The part of a pool that rebalancing uses (:class:`router.pool.pool.ReplicaPool`)."""

    @property
    def workers(self) -> WorkerPool:
        """Where to send orders."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All known workers."""

    def that_take(self, work: Work) -> Sequence[Replica]:
        """The known workers that do this kind of work."""

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """How many tokens of a prompt each worker has in its prefix cache; workers with none are left out."""

    def age_s(self, replica: Replica) -> float:
        """Seconds since a worker's last report."""


class Rebalancer:
    """Looks once a report period. Moves under way are bounded: in all, for each worker, and for each stream.

    A worker that gave or took streams rests until its reports show the effect. If a router dies, no state has to be
    kept, because its streams end with it.
    """

    def __init__(
        self,
        pool: KnownWorkers,
        streams: LiveStreams,
        *,
        settings: RouterSettings,
        counters: RouterCounters,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._streams = streams
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._draw = draw
        self._rests_until_s: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to look, if the settings want it. Idempotent."""
        settings = self._settings
        if (settings.rebalance or settings.moves_waiting_prompts) and self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Order nothing more. Idempotent."""
        tasks = [task for task in (self._looking, *self._sending) if task is not None]
        self._looking = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def knows(self, replica_id: str) -> bool:
        """True for a worker at which live requests can continue."""
        return any(replica.replica_id == replica_id for replica in self._pool.that_take(Work.STREAM))

    async def move(self, source: str, target: str | None, *, num_streams: int) -> int:
        """Carry out an operator's order: move streams of this router away from a worker, the shortest first.

        Returns:
            How many streams were told to move; they move as soon as they can.

        Raises:
            WorkerUnavailableError: The worker does not answer.
            TimeoutError: It does not answer in time.
        """
        movable = [item for item in self._streams.at(source) if item.order is None and not item.is_handed_over]
        movable.sort(key=lambda stream: stream.num_context_tokens)
        order = MoveOrder(target=target, reason=MoveReason.ORDER, ordered_at_s=self._clock())
        chosen = movable[:num_streams]
        for stream in chosen:
            stream.order = order
        if chosen:
            await self._tell(source, chosen)
        return len(chosen)

    def look(self) -> dict[str, list[LiveStream]]:
        """Choose what has to move now, and note the orders on the streams. The caller must tell the workers.

        Returns:
            The streams that should leave, by worker.
        """
        now_s = self._clock()
        streams = {stream.request.request_id: stream for stream in self._streams.all()}
        under_way = self._forget_late_orders(streams.values(), now_s)
        self._rests_until_s = {name: until_s for name, until_s in self._rests_until_s.items() if until_s > now_s}
        num_moves = self._settings.rebalance_max_in_flight - len(under_way)
        moves = self._plan(streams.values(), under_way, now_s, num_moves) if self._settings.rebalance else []
        if self._settings.moves_waiting_prompts:
            moves += self._plan_prompts(streams.values(), now_s, num_moves - len(moves))
        leaving: dict[str, list[LiveStream]] = {}
        for move in moves:
            stream = streams[move.request_id]
            stream.order = MoveOrder(target=move.target, reason=move.reason, ordered_at_s=now_s)
            leaving.setdefault(move.source, []).append(stream)
            for name in (move.source, move.target) if move.reason is not MoveReason.QUEUE else ():
                self._rests_until_s[name] = now_s + self._settings.rebalance_cooldown_s
            logger.debug(
                "moving: request_id=%s reason=%s source=%s target=%s num_context_tokens=%d",
                move.request_id,
                move.reason,
                move.source,
                move.target,
                stream.num_context_tokens,
            )
        return leaving

    def _plan(
        self, streams: Iterable[LiveStream], under_way: Iterable[LiveStream], now_s: float, num_moves: int
    ) -> list[PlannedMove]:
        """Moves of streams that are decoding."""
        limits = MoveLimits(
            max_usage=self._settings.rebalance_max_kv_usage,
            num_moves=num_moves,
            num_moves_a_worker=max(self._settings.rebalance_max_in_flight // 2, 1),
        )
        return plan_moves(
            {replica.replica_id: worker_state(replica) for replica in self._usable()},
            [self._state_of(stream, now_s) for stream in streams],
            limits=limits,
            resting={*_ends_of(under_way), *self._rests_until_s},
            draw=self._draw,
        )

    def _plan_prompts(self, streams: Iterable[LiveStream], now_s: float, num_moves: int) -> list[PlannedMove]:
        """Moves of waiting prompts. These hold no blocks, so no worker has to rest afterwards."""
        movable: dict[str, list[tuple[LiveStream, Demand]]] = {}
        for stream in streams:
            prompt, may_move = stream.prompt, stream.num_moves < self._settings.rebalance_max_moves
            if prompt is not None and may_move and stream.is_waiting:
                movable.setdefault(stream.replica_id, []).append((stream, prompt))
        if not movable or num_moves <= 0:
            return []
        queues = queues_of(self._usable())
        longest = {name: max(prompt.num_tokens for _, prompt in at) for name, at in movable.items()}
        able = may_give(queues, longest)
        waiting = [self._waiting(*item, now_s) for name, at in movable.items() if name in able for item in at]
        return plan_prompt_moves(queues, waiting, num_moves=num_moves)

    def _waiting(self, stream: LiveStream, prompt: Demand, now_s: float) -> WaitingPrompt:
        is_promised = prompt.promise.ttft_ms is not None
        return WaitingPrompt(
            request_id=stream.request.request_id,
            replica_id=stream.replica_id,
            num_tokens=prompt.num_tokens,
            since_s=stream.since_s,
            left_s=stream.first_due_s - now_s if is_promised else None,
            cached_tokens=self._pool.cached_tokens(prompt),
            avoided=stream.goes_on_at,
        )

    def _forget_late_orders(self, streams: Iterable[LiveStream], now_s: float) -> list[LiveStream]:
        """Drop orders that timed out, and return the streams that have an order and have not left yet."""
        under_way = []
        for stream in streams:
            if stream.order is None:
                continue
            since_s = now_s - stream.order.ordered_at_s
            if stream.order.reason is MoveReason.QUEUE and since_s >= self._settings.stale_after_s:
                # It has begun, so it stays. Or its worker's step takes long, and it is given back later.
                stream.late_order, stream.order, stream.prompt = stream.order, None, None
            elif since_s >= ORDER_TIMEOUT_S:
                self._give_up(stream)
            else:
                under_way.append(stream)
        return under_way

    def _give_up(self, stream: LiveStream) -> None:
        if stream.order is not None:
            stream.order = None
            self._counters.num_failed_moves += 1

    def _usable(self) -> list[Replica]:
        """Workers that generate, take requests and have fresh reports."""
        stale_after_s, known = self._settings.stale_after_s, self._pool.that_take(Work.STREAM)
        return [item for item in known if item.takes_requests and self._pool.age_s(item) < stale_after_s]

    def _state_of(self, stream: LiveStream, now_s: float) -> StreamState:
        settings, request = self._settings, stream.request
        itl_ms = request.promise.itl_ms
        return StreamState(
            request_id=request.request_id,
            replica_id=stream.replica_id,
            num_tokens=stream.num_context_tokens,
            num_tokens_left=stream.num_tokens_left,
            itl_s=None if itl_ms is None else itl_ms / 1000,
            may_move=stream.order is None
            and not stream.is_handed_over
            and stream.num_moves < settings.rebalance_max_moves
            and stream.num_tokens_here >= settings.rebalance_min_stay_tokens
            and now_s - stream.since_s >= settings.rebalance_min_stay_s,
        )

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._settings.report_period_s)
            try:
                for source, streams in self.look().items():
                    task = asyncio.create_task(self._try_to_tell(source, streams))
                    self._sending.add(task)
                    task.add_done_callback(self._sending.discard)
            except Exception:
                logger.exception("searching for streams to move failed")

    async def _try_to_tell(self, source: str, streams: Sequence[LiveStream]) -> None:
        try:
            await self._tell(source, streams)
        except (WorkerError, TimeoutError) as error:
            logger.info("moving failed: replica_id=%s num_requests=%d: %s", source, len(streams), error)

    async def _tell(self, source: str, streams: Sequence[LiveStream]) -> None:
        """Send the order to the worker; if that fails, cancel it on the streams."""
        try:
            async with asyncio.timeout(self._settings.abort_timeout_s):
                for is_prompt in (False, True):
                    chosen = [item.request.request_id for item in streams if _is_prompt_move(item) is is_prompt]
                    if chosen:
                        await self._pool.workers.move_out(source, chosen, only_waiting=is_prompt)
        except BaseException:
            for stream in streams:
                self._give_up(stream)
            raise


def _is_prompt_move(stream: LiveStream) -> bool:
    """True for a prompt that should move only if it still waits."""
    return stream.order is not None and stream.order.reason is MoveReason.QUEUE


def _ends_of(under_way: Iterable[LiveStream]) -> Iterator[str]:
    """The sources and targets of moves under way."""
    for stream in under_way:
        yield stream.replica_id
        if stream.order is not None and stream.order.target is not None:
            yield stream.order.target


def worker_state(replica: Replica) -> WorkerState:
    """A worker's state by its last report and what was sent there since. Requests on their way count as its rows.

    An idle worker has lent its cores; it is judged by its own cores, without any that it could borrow.
    """
    load, info = replica.load, replica.info
    num_coming = load.num_loading + load.num_waiting + replica.num_reserved
    mean_context = load.num_context_tokens / load.num_decoding if load.num_decoding else 0.0
    num_running = max(load.num_running, load.num_decoding)
    return WorkerState(
        replica_id=replica.replica_id,
        num_rows=num_running + num_coming,
        num_context_tokens=load.num_context_tokens + num_coming * mean_context,
        num_requests=num_running + num_coming,
        num_blocks=load.num_blocks,
        num_used_blocks=load.num_blocks - replica.num_available_blocks,
        block_size=info.block_size if info is not None else 0,
        step_time=load.step_time if num_running else load.step_time.on(1.0),
        token_move_s=_token_move_s(replica),
        lends_to=lends_on(replica),
    )


def queues_of(replicas: Sequence[Replica]) -> dict[str, PromptQueue]:
    """The prompt tokens that each worker still has to compute. One that keeps to streams gets no prompts. Nor does an
    idle worker while others use its cores, because it would take the cores away from their prompts.
    """
    busy_hosts = {lends_on(replica) for replica in replicas if not replica.is_idle}
    return {
        replica.replica_id: PromptQueue(
            num_tokens=replica.queued_tokens,
            num_late_tokens=replica.load.deferred_prefill_tokens,
            step_time=replica.load.step_time,
            may_take=replica.keeps_to is not Work.STREAM
            and not (replica.is_idle and lends_on(replica) and lends_on(replica) in busy_hosts),
        )
        for replica in replicas
    }


def lends_on(replica: Replica) -> str:
    """The host whose other workers compute with this worker's cores while it is idle; empty: none do."""
    return replica.info.shared_host if replica.info is not None else ""


def _token_move_s(replica: Replica) -> float:
    """Seconds to move the KV of one token, by this worker's average read speed so far."""
    counters, info = replica.load.counters, replica.info
    num_bytes = counters.get("num_bytes", 0.0)
    if info is None or not num_bytes or not info.block_size:
        return HOP_S / 1000
    return counters.get("transfer_s", 0.0) / num_bytes * info.block_bytes / info.block_size
