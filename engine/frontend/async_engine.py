"""An engine as front ends use it: requests in, one stream of tokens per front end out, and reports on itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from functools import partial

from engine.contract.errors import ConnectorDeadError, RequestRefusedError
from engine.contract.messages import (
    CacheChanges,
    CacheReset,
    GenerateRequest,
    LoadReport,
    StepMessage,
    TokenDelta,
    Told,
)
from engine.contract.role import Role
from engine.contract.tracing.request_timings import RequestTimings
from engine.frontend.arrivals import Arrivals, changes_queues, tell_news
from engine.frontend.client_stream import MESSAGE_GAP_S, ClientStream, dead_delta
from engine.frontend.engine_core import EngineCore
from engine.frontend.engine_thread import STEP_TIMEOUT_S, EngineThread
from engine.frontend.feeds import CacheFeed, SelfReport
from engine.frontend.outbox import FrameSink, Outbox
from engine.frontend.request_observer import RequestObserver
from engine.scheduler.step_result import StepResult
from kv_transfer.connector import PeerWorkerConnector
from kv_transfer.params import Hello

REPORT_PERIOD_S = 0.5
"""How often an idle engine reports its load; `router.report_period_s` in a cluster."""


class AsyncEngine:
    """Takes requests in batches, and answers on one stream per front end.

    Everything here happens on the event loop that called :meth:`start`, with two exceptions: the engine itself, which
    ``build`` makes in a thread of its own (:class:`EngineThread`), and :meth:`on_step`, which that thread calls. Steps
    in quick succession share a message.
    """

    def __init__(
        self,
        build: Callable[[], EngineCore],
        *,
        name: str = "engine",
        report_period_s: float = REPORT_PERIOD_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        observer: RequestObserver | None = None,
    ) -> None:
        self._clock, self._observer = clock, observer
        self._thread = EngineThread(build, self, name=name, step_timeout_s=step_timeout_s, clock=clock)
        self._report_period_s = report_period_s
        self._load = self._delivered_load = LoadReport()
        self._streams: dict[str, ClientStream] = {}
        self._outboxes: Mapping[str, Outbox] = {}
        """The mapping is replaced, never changed: the engine's thread reads it."""
        self._requests_of: dict[str, set[str]] = {}
        self._arrivals, self._report = Arrivals(), SelfReport()
        self._is_draining = False
        self.num_peers = 0
        """How many workers this one has met; part of its reports."""
        self.leaning = ""
        """The name of the role whose work it prefers; part of its reports."""
        self._delivered = asyncio.Event()

    async def start(self) -> None:
        """Build the engine and begin to step it.

        Raises:
            Exception: What ``build`` raised.
        """
        self._load = self._delivered_load = await self._thread.start()

    async def close(self) -> None:
        """Stop the thread, end unfinished requests with an error, and release the connector. Idempotent."""
        await self._thread.stop()
        self.on_end()
        await self._thread.release()

    # ---- what it says of itself

    def check_health(self) -> None:
        """Return if the engine can serve; otherwise raise.

        Raises:
            EngineDeadError: Its thread ended or was never started, or its connector's thread ended.
            EngineStalledError: It made no step for too long while it had work.
        """
        self._thread.check_health()
        connector = self._thread.core.connector
        if connector is not None and not connector.is_alive:
            raise ConnectorDeadError

    @property
    def load(self) -> LoadReport:
        """The engine's load after its last step, and whether it is stalled. From any thread."""
        return self._report.of(
            self._load,
            num_peers=self.num_peers,
            leaning=self.leaning,
            is_draining=self._is_draining,
            is_stalled=self.is_stalled,
            has_hung_read=self.has_hung_read,
        )

    def _load_for(self, client_id: str) -> LoadReport:
        """The load as told to one client, with requests that the engine has not added yet. From any thread."""
        return self._arrivals.told_to(client_id, self._load, told=self.load)

    @property
    def is_stalled(self) -> bool:
        """True when there is work but no step has ended in time."""
        return self._thread.is_stalled

    @property
    def has_hung_read(self) -> bool:
        """True while a read of KV hangs for good: only the end of this process is sure to end it."""
        return self._thread.core.has_hung_read

    async def handshake(self, hello: Hello) -> Hello:
        """Exchange hellos with another worker. The connector answers between its reads; only this call waits for it.

        Raises:
            HandshakeRefusedError: Its protocol version or layout differs from ours.
        """
        return await asyncio.to_thread(self._connector().accept, hello)

    def _connector(self) -> PeerWorkerConnector:
        connector = self._thread.core.connector
        assert connector is not None, "engines that others meet have a connector"
        return connector

    # ---- requests

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[RequestRefusedError | None]:
        """Add requests. Their tokens come on the :meth:`outputs` of their client. Returns one answer each, in order.

        Raises:
            EngineDeadError: The engine ended; nothing was added.
        """
        known, new = self._requests_of, [request for request in requests if request.kv_stream is None]
        new = [request for request in new if request.request_id not in known.get(request.client_id, ())]
        for request in new:
            self._requests_of.setdefault(request.client_id, set()).add(request.request_id)
            if self._observer is not None:
                self._observer.came(request)
        answers = await self._add(requests, new)
        refused = {request.request_id for request, answer in zip(requests, answers, strict=True) if answer is not None}
        for request in (item for item in new if item.request_id in refused):
            self._forget(request.client_id, request.request_id)
            if self._observer is not None:
                self._observer.refused(request.request_id)
        return answers

    async def _add(
        self, requests: Sequence[GenerateRequest], new: Sequence[GenerateRequest]
    ) -> list[RequestRefusedError | None]:
        """Add requests within the running step or after it; until then, report ``new`` ones to all other clients."""
        came_s, added, before = self._clock(), list[GenerateRequest](), self._load
        self._arrivals.come(new)
        if new:
            tell_news({**self._outboxes, **self._streams}, but={request.client_id for request in new})

        def add(core: EngineCore) -> tuple[list[RequestRefusedError | None], LoadReport]:
            return [self._try_add(request, core, came_s) for request in requests], self._load

        try:
            answers, before = await self._thread.call(add, is_arrival=True)
            accepted = [request for request, answer in zip(requests, answers, strict=True) if answer is None]
            added = [request for request in accepted if request.kv_stream is None]
        finally:
            self._arrivals.answered(new, added=added, before=before)
        return answers

    async def outputs(self, client_id: str, *, mirrors_cache: bool = False) -> AsyncIterator[StepMessage]:
        """Yield one message per step with all that is new for a client, and one every report period when idle.

        With ``mirrors_cache`` the messages also carry changes of the prefix cache, beginning with a snapshot, if the
        engine records them. A second stream of the same client replaces the first. Closing the iterator aborts the
        client's requests: its router is gone.
        """
        self.check_health()
        self._end_stream(client_id)
        stream = self._streams[client_id] = ClientStream(
            cache=CacheFeed() if mirrors_cache else None, min_gap_s=MESSAGE_GAP_S
        )
        try:
            cache = await self._take_cache_changes(stream.cache)
            yield StepMessage(deltas=(), load=self._load_for(client_id), cache=cache)
            while not stream.is_closed:
                deltas = await stream.take(timeout_s=self._report_period_s)
                told = stream.take_told()
                cache = await self._take_cache_changes(stream.cache)
                yield StepMessage(deltas=tuple(deltas), load=self._load_for(client_id), cache=cache, told=told)
        finally:
            if stream.cache is not None and stream.cache.snapshot is not None:
                stream.cache.snapshot.cancel()
            if self._streams.get(client_id) is stream:
                del self._streams[client_id]
                self._forget_client(client_id)

    async def write_outputs(self, client_id: str, sink: FrameSink, *, mirrors_cache: bool = False) -> None:
        """Send the messages of :meth:`outputs` to ``sink``, each as a frame, until the streams end.

        The engine's thread writes them. Cancelling this aborts the client's requests: its router is gone.
        """
        self.check_health()
        self._end_stream(client_id)
        outbox = Outbox(sink, partial(self._load_for, client_id), cache=CacheFeed() if mirrors_cache else None)
        self._outboxes = {**self._outboxes, client_id: outbox}
        try:
            outbox.report()
            if mirrors_cache:
                self.resync_cache(client_id)
            while not await outbox.has_closed(timeout_s=self._report_period_s):
                outbox.report()
            await sink.drained()
        finally:
            if self._outboxes.get(client_id) is outbox:
                self._outboxes = {key: value for key, value in self._outboxes.items() if value is not outbox}
                self._forget_client(client_id)

    def _forget_client(self, client_id: str) -> None:
        self.abort_nowait(tuple(self._requests_of.pop(client_id, ())))
        if not self._thread.has_ended:
            self._thread.post(lambda core: core.forget_client(client_id))

    def abort_nowait(self, request_ids: Sequence[str]) -> None:
        """End requests at the next step boundary. Unknown ids are ignored; after the engine's end, all are."""
        if request_ids and not self._thread.has_ended:
            self._thread.post(lambda core: core.abort(request_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests in any state, and leases of ended ones; returns when that is done. Ignores unknown ids."""
        await self._thread.call(lambda core: core.abort(request_ids))

    async def move_out(self, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Have requests leave for another engine as soon as they can; returns once the engine has the order.

        Each request ends with a hand-over, on the stream of its client. Unknown ids are ignored, and with
        ``only_waiting`` so are requests that have begun.
        """
        await self._thread.call(lambda core: core.order_out(request_ids, only_waiting=only_waiting))

    def _try_add(self, request: GenerateRequest, core: EngineCore, came_s: float) -> RequestRefusedError | None:
        if self._is_draining:
            return RequestRefusedError("the worker is being drained and accepts no more requests", code="draining")
        try:
            core.add_request(request, waited_s=self._clock() - came_s)
        except RequestRefusedError as refusal:
            return refusal
        return None

    def lean(self, role: Role) -> str:
        """Prefer a role's work from now on, in steps and in reports; returns the role preferred before."""
        self._thread.post(lambda core: core.scheduler.lean(role.prompt_share))
        before, self.leaning = self.leaning, role.name
        return before

    # ---- the end

    @property
    def is_draining(self) -> bool:
        """True when it takes no more requests."""
        return self._is_draining

    def stop_admissions(self) -> None:
        """Take no more requests; those that are here go on."""
        self._is_draining = True

    async def drain(self, *, moves_out: bool, timeout_s: float) -> bool:
        """Take no more requests, wait until no request and no lease is left here, then end the streams.

        With ``moves_out`` running requests end at once, with a hand-over of what was computed for them, and waiting
        ones end unserved, so that another engine can go on. Otherwise requests run to their end.

        Returns:
            False when something was left after ``timeout_s``.
        """
        self.stop_admissions()
        self._thread.moves_out = moves_out
        try:
            async with asyncio.timeout(timeout_s):
                await self._become_empty()
        except TimeoutError:
            return False
        finally:
            self._end_streams()
        return True

    async def _become_empty(self) -> None:
        for _ in range(2):  # the first call ends admissions; the second follows a report that counts them
            await self._thread.call(lambda _: None)
        while not self._delivered_load.is_empty:
            self._delivered.clear()
            await self._delivered.wait()

    def _end_streams(self) -> None:
        """Close all streams; clients learn that nothing more will come."""
        for client_id in (*self._streams, *self._outboxes):
            self._end_stream(client_id)

    def _end_stream(self, client_id: str) -> None:
        for streams in (self._streams, self._outboxes):
            if (stream := streams.get(client_id)) is not None:
                stream.close()

    # ---- the prefix cache

    def resync_cache(self, client_id: str) -> None:
        """Have the next message on a client's stream bring a snapshot of the prefix cache."""
        stream = self._streams.get(client_id)
        if stream is not None and stream.cache is not None:
            stream.cache.needs_snapshot = True
        outbox = self._outboxes.get(client_id)
        if outbox is not None and not self._thread.has_ended:
            self._thread.post(lambda core: outbox.tell_snapshot(core.cache_snapshot()))

    async def reset_prefix_cache(self, *, preempt_running: bool) -> CacheReset | None:
        """Drop the prefix cache and the host tier; None if requests hold blocks and may not be preempted."""
        return await self._thread.call(lambda core: core.reset_prefix_cache(preempt_running=preempt_running))

    async def _take_cache_changes(self, cache: CacheFeed | None) -> tuple[CacheChanges, ...]:
        """The changes of the prefix cache to send now."""
        if cache is None:
            return ()
        snapshot_of = partial(self._thread.call, EngineCore.cache_snapshot)
        return await cache.take_with_snapshot(snapshot_of, timeout_s=self._report_period_s)

    # ---- what the thread brings

    def on_step(self, core: EngineCore, result: StepResult, load: LoadReport, changes: CacheChanges | None) -> None:
        """Pass on a step's result; called by the engine's thread. The event loop is not woken where the result is only
        tokens of running requests, for routers to which this thread writes.
        """
        is_news = load is not self._load or changes is not None or bool(result.special) or bool(result.finished)
        has_news, self._load = changes_queues(self._load, load), load
        by_client, outboxes = result.deltas_by_client(), self._outboxes
        told = result.told_by_client() if result.told else {}
        for client_id, outbox in outboxes.items():
            if changes is not None:
                outbox.put_cache(changes)
            if (deltas := by_client.get(client_id)) is not None:
                outbox.put(deltas, told.get(client_id, ()))
            elif has_news:
                outbox.put(())
            if outbox.wants_snapshot:
                outbox.tell_snapshot(core.cache_snapshot())
        if is_news or not by_client.keys() <= outboxes.keys():
            self._thread.to_loop(self._deliver, by_client, outboxes, load, changes, told)

    def _deliver(
        self,
        by_client: Mapping[str, Sequence[TokenDelta]],
        written: Container[str],
        load: LoadReport,
        changes: CacheChanges | None,
        told: Mapping[str, Sequence[Told]],
    ) -> None:
        """Take note of a step, and pass on the deltas of clients whose message has not been written yet."""
        has_news, self._delivered_load = changes_queues(self._delivered_load, load), load
        self._delivered.set()
        if has_news:
            tell_news(self._streams, but=by_client)
        if changes is not None:
            for stream in self._streams.values():
                if stream.cache is not None:
                    stream.cache.put(changes)
        if self._observer is not None:
            timings = [item for items in told.values() for item in items if isinstance(item, RequestTimings)]
            self._observer.saw(timings, by_client.values())
        for client_id, deltas in by_client.items():
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._forget(client_id, delta.request_id)
            if client_id not in written and (stream_of_client := self._streams.get(client_id)) is not None:
                stream_of_client.put(deltas, told.get(client_id, ()))

    def on_end(self) -> None:
        """End every unfinished request with an error: this engine will not serve it any more."""
        for client_id, request_ids in list(self._requests_of.items()):
            ends = [dead_delta(request_id) for request_id in request_ids]
            if (outbox := self._outboxes.get(client_id)) is not None:
                outbox.put(ends)
            self._deliver({client_id: ends}, self._outboxes, self._delivered_load, None, {})
        self._end_streams()

    def _forget(self, client_id: str, request_id: str) -> None:
        ids = self._requests_of.get(client_id)
        if ids is not None:
            ids.discard(request_id)
            if not ids:
                del self._requests_of[client_id]
