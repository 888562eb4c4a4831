"""A worker without a process: a real engine whose steps only take virtual time, and its front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from engine.contract.config import CacheConfig
from engine.contract.errors import RequestRefusedError
from engine.contract.messages import CacheChanges, CacheReset, GenerateRequest, LoadReport, StepMessage
from engine.contract.role import Role
from engine.frontend.arrivals import Arrivals, changes_queues, tell_news
from engine.frontend.client_stream import MESSAGE_GAP_S, ClientStream
from engine.frontend.engine_core import EngineCore
from engine.frontend.feeds import LOAD_PERIOD_S, CacheFeed, LoadFeed, SelfReport
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_result import NOTHING_NEW, StepResult
from kv_transfer.params import PeerIdentity
from router.roles import ROLES
from simulation.faults.process import Process
from simulation.kv.transfers import VirtualFabric, VirtualTransfers
from simulation.step_runner import Host, VirtualRunner, VirtualThreads
from simulation.worker_spec import WorkerSpec, layout_of, worker_info

INCARNATION = "1"
LEASE_TTL_S = 30.0
STEP_TIMEOUT_S = 10.0
"""How long an engine with work may make no step before its reports say that it is stalled."""


class WorkerGoneError(Exception):
    """The worker left after it was drained, or was killed."""

    def __init__(self, *, name: str, was_killed: bool) -> None:
        super().__init__(f"{name} {'was killed' if was_killed else 'left'}")
        self.was_killed = was_killed


class VirtualWorker:
    """An engine that makes its steps in the event loop's time, and answers routers as a deployed worker does.

    Its scheduler, block pool, prefix cache, leases and reports are the real ones. Tokens, load and cache changes are
    reported when a step ends. Several decode steps in one are cut short by any event that a worker checks for between
    two steps; ``fabric.token_times`` has the times of their tokens.
    """

    def __init__(self, spec: WorkerSpec, fabric: VirtualFabric, host: Host | None = None) -> None:
        machine = spec.machine
        self.spec = spec
        self._host = host or Host()
        self._host.join(self._cut_step)
        self._loop = fabric.loop
        self._token_times = fabric.token_times
        self.process = Process(self._loop)
        identity = PeerIdentity(engine_id=spec.name, incarnation=INCARNATION)
        layout = layout_of(machine)
        self.transfers = VirtualTransfers(
            fabric=fabric,
            identity=identity,
            layout=layout,
            model=machine.transfer,
            clock=self._loop.time,
            process=self.process,
            wake=self._wake,
            lease_ttl_s=LEASE_TTL_S,
            streamed=spec.streamed,
        )
        self.runner = VirtualRunner(
            machine, self._loop.time, host=self._host, max_num_seqs=spec.scheduler.max_num_seqs, seed=spec.seed
        )
        self.core = EngineCore(
            scheduler=Scheduler(
                spec.scheduler,
                CacheConfig(block_size=machine.block_size),
                num_blocks=machine.num_blocks,
                max_model_len=machine.max_model_len,
                connector=self.transfers.scheduler_half,
                clock=self._loop.time,
            ),
            runner=self.runner,
            connector=self.transfers,
            clock=self._loop.time,
        )
        self.core.share_cores(VirtualThreads(machine, self._host))
        self.info = worker_info(spec, layout, identity, self._host.address)
        self.is_gone = self._was_killed = False
        self._load_feed = LoadFeed(self.core, clock=self._loop.time)
        self._load = self._load_feed.now()
        self._streams: dict[str, ClientStream] = {}
        self._requests_of: dict[str, set[str]] = {}
        self._arrivals, self._report = Arrivals(), SelfReport()
        self._commands: list[Callable[[], None]] = []
        self._next_turn: asyncio.Handle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._late_at_s = 0.0
        self._is_draining = self._moves_out = False
        self.leaning = ""
        """The role whose work this worker prefers now."""
        self.lean(ROLES[spec.role])
        self._emptied = asyncio.Event()

    @property
    def load(self) -> LoadReport:
        """The worker's load report."""
        return self._report.of(
            self._load,
            num_peers=self.transfers.num_peers,
            leaning=self.leaning,
            is_draining=self._is_draining,
            is_stalled=self._is_stalled,
        )

    @property
    def _is_stalled(self) -> bool:
        since_s = self.process.stuck_since_s
        return since_s is not None and self._loop.time() - since_s > STEP_TIMEOUT_S and not self._is_empty

    def lean(self, role: Role) -> str:
        """Prefer a role's work from now on. Returns the role that it preferred before."""
        before, self.leaning = self.leaning, role.name
        self.core.scheduler.lean(role.prompt_share)
        return before

    def late_load(self) -> LoadReport | None:
        """The load that the worker would have reported by now if its decode steps were made one by one; None: none."""
        step, now_s = self.runner.under_way, self._loop.time()
        if step is None or now_s - max(self._load_feed.told_at_s, self._late_at_s) < LOAD_PERIOD_S:
            return None
        self._late_at_s = now_s
        return step.load_at(now_s, self.load, block_size=self.spec.machine.block_size)

    async def rest(self) -> None:
        """Return when nothing is held here for any request, or the worker is gone."""
        while not (self.is_gone or self._is_empty):
            self._emptied.clear()
            await self._emptied.wait()

    @property
    def _is_empty(self) -> bool:
        """True when nothing is held here for any request, and nothing runs."""
        return self._load.is_empty and not (self._load.num_held_blocks or self._end is not None or self._commands)

    # ---- what routers ask

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[RequestRefusedError | None]:
        """Add requests, within the running step if there is one; one answer each, in order.

        Raises:
            WorkerGoneError: The requests were not added, or are lost.
        """
        answers: list[RequestRefusedError | None] = []
        new = [request for request in requests if request.kv_stream is None]
        added: list[GenerateRequest] = []
        before = self._load

        def add() -> None:
            nonlocal before
            answers.extend(self._try_add(request) for request in requests)
            accepted = [request for request, answer in zip(requests, answers, strict=True) if answer is None]
            added.extend(request for request in accepted if request.kv_stream is None)
            before = self._load

        self._arrivals.come(new)
        if new:
            tell_news(self._streams, but={request.client_id for request in new})
        try:
            await self._run(add, is_arrival=True)
        finally:
            self._arrivals.answered(new, added=added, before=before)
        return answers

    def _load_for(self, client_id: str) -> LoadReport:
        return self._arrivals.told_to(client_id, self._load, told=self.load)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests in any state; unknown ids are ignored.

        Raises:
            WorkerGoneError: The worker is gone, and its requests with it.
        """
        await self._run(lambda: self.core.abort(request_ids))

    async def move_out(self, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Let requests move to another worker as soon as they can; unknown ids are ignored.

        Raises:
            WorkerGoneError: The worker is gone, and its requests with it.
        """
        await self._run(lambda: self.core.order_out(request_ids, only_waiting=only_waiting))

    async def outputs(self, client_id: str, *, mirrors_cache: bool) -> AsyncIterator[StepMessage]:
        """One message per step with everything new for a client, and one per report period when idle. Closing the
        iterator aborts the client's requests.

        Raises:
            WorkerGoneError: The worker is gone. Raised by the iterator.
        """
        self.check()
        cache = CacheFeed() if mirrors_cache else None
        stream = self._streams[client_id] = ClientStream(cache=cache, min_gap_s=MESSAGE_GAP_S)
        try:
            yield StepMessage(deltas=(), load=self._load_for(client_id), cache=self._take_cache(cache))
            while not stream.is_closed:
                deltas = await stream.take(timeout_s=self.spec.report_period_s)
                await self.process.running()
                self.check()
                load = self._load_for(client_id)
                yield StepMessage(deltas=tuple(deltas), load=load, cache=self._take_cache(cache))
        finally:
            leave = partial(self._leave, client_id, stream)
            if not self.process.keeps(leave):
                leave()

    def resync_cache(self, client_id: str) -> None:
        """Let the next message of a client's stream report the whole prefix cache."""
        stream = self._streams.get(client_id)
        if stream is not None and stream.cache is not None:
            stream.cache.needs_snapshot = True

    async def reset_prefix_cache(self, *, preempt_running: bool) -> CacheReset | None:
        """Drop the prefix cache; None if requests hold blocks and may not be preempted.

        Raises:
            WorkerGoneError: The worker is gone, and its cache with it.
        """
        dropped: list[CacheReset | None] = []
        await self._run(lambda: dropped.append(self.core.reset_prefix_cache(preempt_running=preempt_running)))
        return dropped[0]

    async def drain(self, *, moves_out: bool) -> None:
        """Take no more requests, and end the streams when nothing is left here. With ``moves_out`` live requests leave
        at once, and their KV is kept under leases.
        """
        self._is_draining, self._moves_out = True, moves_out
        self._wake()
        await self.rest()
        self.close()

    def kill(self) -> None:
        """End at once: streams break, calls fail, and all computed KV is lost."""
        self._was_killed = True
        self.close()

    def close(self) -> None:
        """End the streams, and leave the cluster. Idempotent."""
        self.is_gone = True
        self.process.go_on()
        self._emptied.set()
        self._set_turn(None)
        self.transfers.close()
        for stream in self._streams.values():
            stream.close()
        commands, self._commands = self._commands, []
        for command in commands:
            command()

    # ---- between the calls and the engine

    def check(self) -> None:
        """Do nothing while the worker exists.

        Raises:
            WorkerGoneError: The worker is gone.
        """
        if self.is_gone:
            raise self._gone()

    def _gone(self) -> WorkerGoneError:
        return WorkerGoneError(name=self.spec.name, was_killed=self._was_killed)

    async def _run(self, action: Callable[[], object], *, is_arrival: bool = False) -> None:
        self.check()
        done: asyncio.Future[None] = self._loop.create_future()

        def command() -> None:
            if not self.is_gone:
                action()
            if not done.done() and self.is_gone:
                done.set_exception(self._gone())
            elif not done.done():
                done.set_result(None)

        self._post(command, is_arrival=is_arrival)
        await done

    def _post(self, command: Callable[[], None], *, is_arrival: bool = False) -> None:
        """Run a command between two steps; one that only adds requests within a step, and begin their loads."""
        is_early = is_arrival and self.spec.machine.loads_within_steps and self.process.makes_steps
        if is_early and self._end is not None and not self._commands:
            command()
            self.core.begin_loads()
        elif not self.is_gone:
            self._commands.append(command)
        self._wake()

    def _leave(self, client_id: str, stream: ClientStream) -> None:
        if self._streams.get(client_id) is stream:
            del self._streams[client_id]
            self._post(partial(self.core.abort, tuple(self._requests_of.pop(client_id, ()))))
            self._post(partial(self.core.forget_client, client_id))

    def _try_add(self, request: GenerateRequest) -> RequestRefusedError | None:
        if self._is_draining:
            return RequestRefusedError("the worker is being drained and accepts no more requests", code="draining")
        try:
            self.core.add_request(request)
        except RequestRefusedError as refusal:
            return refusal
        if request.kv_stream is None:
            self._requests_of.setdefault(request.client_id, set()).add(request.request_id)
        return None

    def _take_cache(self, cache: CacheFeed | None) -> tuple[CacheChanges, ...]:
        if cache is None or not cache.needs_snapshot:
            return () if cache is None else cache.take()
        cache.take()
        cache.needs_snapshot = False
        return (self.core.cache_snapshot(),)

    # ---- the engine's turns

    def _wake(self) -> None:
        """Take the next turn as soon as the running step has ended."""
        if self.is_gone:
            return
        if self._end is None:
            self._set_turn(self._loop.call_soon(self._take_turn))
            return
        self._cut_step()

    def _cut_step(self) -> None:
        step = self.runner.under_way
        if step is not None and self._end is not None and step.cut(self._loop.time()):
            self._end.cancel()
            self._end = self._loop.call_at(step.end_s, self._end_step)

    def _set_turn(self, turn: asyncio.Handle | None) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._next_turn = turn

    def _take_turn(self) -> None:
        """Run the queued commands. Then make a step if there is work, else report the load and wait."""
        if self.is_gone or self.process.keeps_step(self._take_turn):
            return
        self._next_turn = None
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        core = self.core
        core.collect()
        if self._moves_out:
            core.move_out()
        if core.has_work():
            self._make_step()
            return
        core.pause()
        self._host.rests(self._cut_step)
        self._tell(NOTHING_NEW, self._load_feed.now(), core.cache_changes())
        idle_s = core.scheduler.idle_timeout_s()
        if idle_s is not None and self._next_turn is None:
            self._set_turn(self._loop.call_later(max(idle_s, 1e-6), self._take_turn))

    def _make_step(self) -> None:
        self.core.begin_step()
        step = self.runner.under_way
        self._host.step_begins(self._cut_step)
        self._end = self._loop.call_at(self._loop.time() if step is None else step.end_s, self._end_step)

    def _end_step(self) -> None:
        if self.process.keeps_step(self._end_step):
            return
        self._host.step_ends()
        if self.is_gone:
            return
        self._end, step, result = None, self.runner.under_way, self.core.end_step()
        if step is not None and len(step.ends_s) > 1:
            for request in result.requests:
                self._token_times.add(request.request_id, step.ends_s[: step.num_steps])
        self._tell(result, self._load_feed.after_step(), self.core.cache_changes())
        self._take_turn()

    def _tell(self, result: StepResult, load: LoadReport, changes: CacheChanges | None) -> None:
        has_news, self._load = changes_queues(self._load, load), load
        if load.is_empty:
            self._emptied.set()
        if changes is not None:
            for stream in self._streams.values():
                if stream.cache is not None:
                    stream.cache.put(changes)
        by_client = result.deltas_by_client()
        if has_news:
            tell_news(self._streams, but=by_client)
        for client_id, deltas in by_client.items():
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._requests_of.get(client_id, set()).discard(delta.request_id)
            if (stream_of_client := self._streams.get(client_id)) is not None:
                stream_of_client.put(deltas)
