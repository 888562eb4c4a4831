"""A router over real engines with a small model, for cells of the parity matrix, with requests and counters.

Everything is real but the processes between the parts: the API, the router, the engines, their connectors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from engine.build import build_engine, worker_info
from engine.contract.config import SchedulerConfig, SpeculativeConfig
from engine.contract.executor import StepRunner
from engine.contract.messages import LoadReport, WorkerInfo
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from engine.model.registry import load_model_config
from kv_transfer.connector import ConnectorBuilder
from kv_transfer.params import PeerIdentity
from router.api.app import build_app
from router.pool.pool import ReplicaPool
from router.service import RouterService
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.engine_pools import EngineMaker, EnginePool, pools_by_role
from tests.support.engine.overlap_runner import OverlapRunner
from tests.support.engine.stepwise_runner import StepwiseRunner
from tests.support.parity.answers import Answer, forget_drafts, read_answer
from tests.support.parity.feature import Feature
from tests.support.parity.setup import MAX_MODEL_LEN, NO_CHUNKS, Setup
from tests.support.router.router_rig import until


@dataclass(slots=True, kw_only=True)
class World:
    """All parts of a cell. ``runners`` are the runners that wait for the test, by the engine's name.

    ``watched`` are the decode engines' runners, which know whether steps overlapped.
    """

    setup: Setup
    pools: dict[str, EnginePool]
    service: RouterService
    client: httpx.AsyncClient
    runners: dict[str, StepwiseRunner]
    watched: list[OverlapRunner]
    killed: set[str] = field(default_factory=set)
    _before: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def prefill(self) -> EnginePool:
        """The engines that were started for prompts."""
        return self.pools["prefill"]

    @property
    def decode(self) -> EnginePool:
        """The engines that were started for streams."""
        return self.pools["decode"]

    @property
    def engines(self) -> dict[str, AsyncEngine]:
        """All engines by name, killed ones included."""
        return {name: engine for pool in self.pools.values() for name, engine in pool.engines.items()}

    @property
    def _router_pools(self) -> tuple[ReplicaPool, ReplicaPool]:
        """The router's pools for prompts and for streams; one and the same where workers may do both."""
        return self.service.prefill_pool, self.service.decode_pool

    async def begin(self) -> None:
        """Reset: lost or drained engines get successors, caches are emptied, and runners wait again."""
        await self._replace_the_lost()
        for reset in await self.service.administration.reset_prefix_cache(preempt_running=False):
            assert reset.dropped is not None, reset.reason
        if self.setup.settings.is_elastic:
            await self.lean({name: name.partition("-")[0] for name in self.engines})
        for name, runner in self.runners.items():
            runner.pace(self.setup.steps[name.partition("-")[0]])
        if self.setup.num_mixed:  # then load decides who does what, and the router may know an old one
            replicas = self.service.decode_pool.replicas
            await until(lambda: all(item.is_idle and not item.promised_usage for item in replicas))
        self.count_anew()

    async def ask(self, feature: Feature) -> Answer:
        """The answer to a row's request."""
        answer = await self.post(feature.url, feature.body)
        if "prediction" not in feature.body:  # then these tell how many drafts there were, which paths differ in
            forget_drafts(answer)
        return answer

    async def post(self, url: str, body: dict[str, Any]) -> Answer:
        """The answer to any request."""
        return read_answer(await self.client.post(url, json=body))

    async def _replace_the_lost(self) -> None:
        """Start a successor for each engine that was killed or drains, and wait until the router knows exactly the
        engines that exist.
        """
        for pool in self.pools.values():
            for name in [name for name, engine in pool.engines.items() if name in self.killed or engine.is_draining]:
                self.runners.pop(name, None)
                await pool.replace(name)
        self.killed.clear()
        names = set(self.engines)

        def are_known() -> bool:
            known = [item for pool in self._router_pools for item in pool.replicas]
            return {item.replica_id for item in known if item.takes_requests and item.has_stream} == names

        await until(are_known, timeout_s=60)

    def count(self, counter: str) -> float:
        """The sum of a counter over everything that has it, since the cell began or since ``count_anew``.

        ``counter`` is "<role> <counter of its engines>", "<engine> <counter>", "router <counter>", or "runners
        num_overlaps".
        """
        source, _, name = counter.partition(" ")
        counted = {who: of_one for who, of_one in self._counted().items() if source in (who, who.partition("-")[0])}
        assert counted, counter
        assert all(name in of_one for of_one in counted.values()), counter
        return sum(of_one[name] - self._before.get(who, Counter())[name] for who, of_one in counted.items())

    def count_anew(self) -> None:
        """Reset the counts."""
        self._before = self._counted()

    def _counted(self) -> dict[str, Counter[str]]:
        """The counters of everything that lives, by name."""
        return {
            "router": Counter(asdict(self.service.counters)),
            "runners": Counter(num_overlaps=sum(runner.num_overlaps for runner in self.watched)),
            **{name: Counter(load.counters) for role in self.pools for name, load in self._loads(role).items()},
        }

    def engine(self, name: str) -> AsyncEngine:
        """One engine."""
        return self.engines[name]

    def first(self, role: str) -> str:
        """The name of the first engine that was started for a role."""
        return next(iter(self.pools[role].engines))

    def _loads(self, role: str) -> dict[str, LoadReport]:
        """Load reports of the engines that live."""
        return {name: engine.load for name, engine in self.pools[role].engines.items() if name not in self.killed}

    async def lean(self, role_of: Mapping[str, str]) -> None:
        """Order engines to lean to other roles, and let the router notice."""
        for name, role in role_of.items():
            await self.service.administration.lean(name, role)
        leanings = {replica.replica_id: replica for replica in self.service.decode_pool.replicas}
        await until(lambda: all(leanings[name].leaning == role for name, role in role_of.items()))

    async def waiting_engine(self, role: str) -> str:
        """Wait until an engine of a role has made its allowed steps; returns the name of the first one."""
        runners = {name: runner for name, runner in self.runners.items() if name.startswith(role)}
        await until(lambda: any(runner.is_waiting for runner in runners.values()), timeout_s=60)
        return next(name for name, runner in runners.items() if runner.is_waiting)

    async def kill(self, name: str) -> None:
        """Kill an engine in the middle of a step."""
        self.killed.add(name)
        closing = asyncio.create_task(self.engine(name).close())
        await asyncio.sleep(0)  # from here on the step that it is in is its last
        self.let_go()
        await closing

    def let_go(self) -> None:
        """Let all engines run freely from now on."""
        for runner in self.runners.values():
            runner.open()

    async def rest(self) -> None:
        """Wait until no engine holds anything."""

        def rests() -> bool:
            loads = [load for role in self.pools for load in self._loads(role).values()]
            return self.service.num_alive == 0 and all(load.is_empty and not load.num_held_blocks for load in loads)

        await until(rests, timeout_s=60)


def _engines(path: Path, setup: Setup) -> EngineMaker:
    def make(role: str, name: str, num_blocks: int, build_connector: ConnectorBuilder) -> tuple[EngineCore, WorkerInfo]:
        config = small_engine_config(path, num_blocks=num_blocks)
        scheduler = SchedulerConfig(
            max_num_batched_tokens=NO_CHUNKS if role == "decode" else setup.chunk_tokens,
            max_num_seqs=16,
            max_model_len=MAX_MODEL_LEN,
            policy="priority",
            enable_cache_events=True,
            **setup.scheduler,
        )
        speculative = SpeculativeConfig()
        if setup.is_own_draft and role == "decode":
            speculative = SpeculativeConfig(method="draft_model", draft_model=path, num_tokens=3)
        built = build_engine(
            replace(config, scheduler=scheduler, speculative=speculative),
            build_connector=build_connector,
            drafting=setup.drafting() if role == "decode" and setup.drafting is not None else None,
        )
        info = worker_info(
            built.facts,
            role=role,
            identity=PeerIdentity(engine_id=name, incarnation="1"),
            node_ip="127.0.0.1",
            model_name="tiny",
            stream_chunk_tokens=setup.chunk_tokens if setup.options.streamed else 0,
        )
        return built.core, info

    return make


@asynccontextmanager
async def world(path: Path, setup: Setup | None = None) -> AsyncIterator[World]:
    """Serve a checkpoint that has a tokenizer; at the end, no remaining engine may hold anything."""
    setup = setup or Setup()
    runners: dict[str, StepwiseRunner] = {}
    num_paced: Counter[str] = Counter()
    watched: list[OverlapRunner] = []

    def paced(role: str, runner: StepRunner) -> StepRunner:
        if role not in setup.steps:
            return runner
        name = f"{role}-{num_paced[role]}"  # as its engine is called
        num_paced[role] += 1
        runners[name] = StepwiseRunner(runner)
        runners[name].allow(setup.steps[role])
        return runners[name]

    def watching(runner: StepRunner) -> StepRunner:
        watched.append(OverlapRunner(paced("decode", runner)))
        return watched[-1]

    with TemporaryDirectory(prefix="baton-parity-") as folder:
        num_blocks = setup.num_blocks * len(load_model_config(path).kv_cache_groups)
        async with pools_by_role(
            {role: [num_blocks] * number for role, number in setup.num_engines.items()},
            wrap={"prefill": partial(paced, "prefill"), "decode": watching, "mixed": partial(paced, "mixed")},
            options=setup.connector_options(Path(folder)),
            make=_engines(path, setup),
            are_elastic=setup.settings.is_elastic,
        ) as pools:
            service = RouterService(path, "tiny", pools, setup.settings)
            await service.start()
            try:
                transport = httpx.ASGITransport(build_app(service))
                async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
                    made = World(
                        setup=setup,
                        pools=pools,
                        service=service,
                        client=client,
                        runners=runners,
                        watched=watched,
                    )
                    yield made
                    await made.rest()
            finally:
                for runner in runners.values():
                    runner.open()
                await service.close()


@asynccontextmanager
async def asking(made: World, feature: Feature) -> AsyncIterator[asyncio.Task[Answer]]:
    """The answer to a row's request, as a task. The block disturbs its generation; afterwards all engines continue."""
    answering = asyncio.create_task(made.ask(feature))
    try:
        yield answering
    finally:
        made.let_go()
        await asyncio.wait((answering,))
