"""The router without HTTP: text in, text out, over pools of workers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.contract.messages import GenerateRequest, SamplingParams, WorkerInfo
from engine.contract.role import Work
from router.administration import Administration
from router.attentive_clock import AttentiveClock
from router.balance.leaning_control import LeaningControl
from router.balance.rebalancer import Rebalancer
from router.balance.streams import LiveStreams
from router.body_room import BodyRoom
from router.errors import NoReplicaError, UnknownModelError
from router.grammar.checker import GrammarChecker
from router.live.feed import LiveFeed
from router.live.sampler import Sampler
from router.pool.pool import ReplicaPool
from router.pool.workers import WorkerPool
from router.report.cluster_view import ClusterView
from router.report.counters import RouterCounters
from router.report.metrics import RouterMetrics
from router.report.router_report import NoPeers, RouterPeers
from router.request.generation import Generation
from router.request.orchestrator import Orchestrator
from router.request.text_output import TextOutput
from router.request.text_request import TextRequest
from router.roles import role_for
from router.scaling.control import ScalingControl
from router.settings import RouterSettings
from router.stored_responses.directory import ResponseDirectory
from router.stored_responses.store import ResponseStore
from router.telemetry.tracer import ProcessTracer
from router.text.chat_renderer import ChatRenderer
from router.text.detokenizer import Detokenizer, DetokenizerFactory
from router.text.generation_config import GenerationDefaults, load_generation_defaults
from router.text.stop_strings import StopStrings
from router.text.template_files import load_chat_templates
from router.text.token_spelling import TokenSpeller
from router.text.tokenizer import Tokenizer
from router.tools.reasoning import ReasoningFormat
from router.tools.registry import reasoning_format, tool_format
from router.tools.tool_format import ToolFormat
from router.trace.directory import trace_directory
from router.wire.linked_calls import link_for, make_links, role_views

logger = logging.getLogger(f"baton.{__name__}")


class RouterService:
    """One router: its tokenizer and template, its view of the pools, and all its requests."""

    def __init__(
        self,
        model_dir: Path,
        model_name: str,
        pools: Mapping[str, WorkerPool],
        settings: RouterSettings | None = None,
        *,
        router_id: str | None = None,
        peers: RouterPeers | None = None,
        node_ip: str | None = None,
        aliases: Sequence[str] = (),
        params: type[SamplingParams] = SamplingParams,
        tracer: ProcessTracer | None = None,
    ) -> None:
        """Load the tokenizer and the chat templates.

        ``pools`` are the workers by role, ``peers`` the other routers, ``aliases`` further names of the model.
        ``params`` declare what requests may pass to logits processors; ``tracer`` makes requests' spans.

        Raises:
            ModelDirectoryError: The directory has no usable tokenizer or template.
        """
        self.model_name, self._names = model_name, (model_name, *aliases)
        self.settings = settings or RouterSettings()
        self.params = params
        peers = peers or NoPeers()
        self.body_room = self._body_room()
        self.router_id = router_id or uuid.uuid4().hex[:12]
        self.tokenizer = Tokenizer.load(model_dir)
        self.chat_renderer = self._chat_renderer(model_dir)
        self.defaults: GenerationDefaults = load_generation_defaults(model_dir, params=params)
        self.tool_format, self.reasoning_format = self._formats()
        self._detokenizers, self.grammars = DetokenizerFactory(self.tokenizer), GrammarChecker.of(self.settings)
        self.speller = TokenSpeller(self.tokenizer, self._detokenizers.table)
        self.counters, self._clock = RouterCounters(), AttentiveClock(max_gap_s=2 * self._refresh_period_s())
        self._links = make_links(pools, settings=self.settings, clock=self._clock)
        self._pools = tuple(dict.fromkeys(link.pool for link in self._links.values()))
        self.role_views = role_views(self._links)
        self.prefill_pool, self.decode_pool = (link_for(self._links, work).pool for work in Work)
        self.metrics = RouterMetrics(self.counters)
        streams = LiveStreams()
        self.traces = trace_directory(self.settings, peers, model=model_name, router_id=self.router_id, tracer=tracer)
        self._orchestrator = self._make_orchestrator(streams)
        self.rebalancer = Rebalancer(self.decode_pool, streams, settings=self.settings, counters=self.counters)
        self.view = self._cluster_view(peers, node_ip)
        self.live = self._live_feed()
        self.leanings = self._leaning_control(self.decode_pool)
        self.scaling = self._scaling_control()
        self.administration = self._administration()
        self.responses = self._directory(peers)
        self._refreshing: asyncio.Task[None] | None = None

    def _cluster_view(self, peers: RouterPeers, node_ip: str | None) -> ClusterView:
        running = self._orchestrator
        self.metrics.watch(in_progress=lambda: running.num_alive, waiting=lambda: running.num_waiting)
        view = ClusterView(
            router_id=self.router_id,
            model_name=self.model_name,
            load=running,
            pools=self.role_views,
            metrics=self.metrics,
            counters=self.counters,
            peers=peers,
            settings=self.settings,
            node_ip=node_ip,
        )
        view.own_arrivals = running.arrivals
        return view

    def _live_feed(self) -> LiveFeed:
        pools, settings = self.role_views, self.settings
        return LiveFeed(Sampler(pools, self.view, model=self.model_name, router_id=self.router_id, settings=settings))

    def _leaning_control(self, pool: ReplicaPool) -> LeaningControl:
        return LeaningControl(
            pool, pool.workers, view=self.view, own_id=self.router_id, settings=self.settings, counters=self.counters
        )

    def _scaling_control(self) -> ScalingControl:
        pools, view, counters = self.role_views, self.view, self.counters
        return ScalingControl(pools, view=view, own_id=self.router_id, settings=self.settings, counters=counters)

    def _administration(self) -> Administration:
        timeout_s, is_elastic = self.settings.abort_timeout_s, self.settings.is_elastic
        pools, hold = self.role_views, self.leanings.hold
        return Administration(pools, self.rebalancer, timeout_s=timeout_s, is_elastic=is_elastic, on_leaned=hold)

    def _body_room(self) -> BodyRoom:
        settings = self.settings
        return BodyRoom(
            max_bytes=settings.max_reading_bytes, wait_s=settings.reading_wait_s, retry_after_s=settings.retry_after_s
        )

    def _chat_renderer(self, model_dir: Path) -> ChatRenderer:
        settings = self.settings
        templates = load_chat_templates(
            model_dir, special_tokens=self.tokenizer.special.named, max_characters=settings.max_body_bytes
        )
        return ChatRenderer(templates, wait_s=settings.reading_wait_s, retry_after_s=settings.retry_after_s)

    def _directory(self, peers: RouterPeers) -> ResponseDirectory:
        settings = self.settings
        store = ResponseStore(
            router_id=self.router_id,
            max_count=settings.max_stored_responses,
            max_bytes=settings.max_stored_response_bytes,
            ttl_s=settings.stored_response_ttl_s,
        )
        return ResponseDirectory(
            store,
            peers,
            own_id=self.router_id,
            timeout_s=settings.status_timeout_s,
            retry_after_s=settings.retry_after_s,
        )

    def _make_orchestrator(self, streams: LiveStreams) -> Orchestrator:
        prompts, others = (link_for(self._links, work) for work in Work)
        settings, counters, recorder = self.settings, self.counters, self.traces.recorder
        return Orchestrator(prompts, others, streams=streams, settings=settings, counters=counters, recorder=recorder)

    def _formats(self) -> tuple[ToolFormat | None, ReasoningFormat | None]:
        """The model's formats of tool calls and of thinking; None for one that the model does not have."""
        templates = self.chat_renderer.templates
        source = None if templates is None else templates.default.source
        of_tools = None if templates is None else templates.with_tools.source
        return (
            tool_format(self.settings.tool_format, of_tools),
            reasoning_format(self.settings.reasoning_format, source, self.tokenizer),
        )

    async def start(self) -> None:
        """Discover the replicas, and keep polling them. Idempotent."""
        if self._refreshing is not None:
            return
        await self._refresh(wait=True)
        await asyncio.gather(*(link.hear_all() for link in dict.fromkeys(self._links.values())))
        self._refreshing = asyncio.create_task(self._keep_refreshing())
        await self.view.start()
        self.rebalancer.start()
        self.leanings.start()
        self.scaling.start()

    async def close(self) -> None:
        """End all requests, tell the workers, stop. Idempotent."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
            self._refreshing = None
        self.live.close()
        await self.rebalancer.close()
        await self.leanings.close()
        await self.scaling.close()
        await self._orchestrator.close()
        await self.chat_renderer.close()
        self.grammars.close()
        await self.view.close()
        await self.traces.close()
        for pool in self._pools:
            await pool.close()

    @property
    def num_alive(self) -> int:
        """Sequences in progress, including those that wait."""
        return self._orchestrator.num_alive

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room on a decode worker."""
        return self._orchestrator.num_waiting

    def is_ready(self) -> bool:
        """True when at least one replica of each role takes requests, and those of prompts and streams have met."""
        return not self.waits_for()

    def waits_for(self) -> str:
        """What is missing before requests can be served; empty when nothing is."""
        for role, link in self._links.items():
            if not link.pool.has_introduced(role):
                return f"a {role} worker"
        if any(item.takes_requests and item.load.num_peers for item in self.decode_pool.that_take(Work.STREAM)):
            return ""
        return f"a {role_for(Work.STREAM).name} worker that is connected to a {role_for(Work.PROMPT).name} worker"

    def max_model_len(self) -> int:
        """The context length that every replica can serve.

        Raises:
            NoReplicaError: No replica introduced itself yet.
        """
        return min(info.max_model_len for info in self._infos())

    def vocab_size(self) -> int:
        """Token ids below this number exist in the model.

        Raises:
            NoReplicaError: No replica introduced itself yet.
        """
        return min(info.vocab_size for info in self._infos())

    def _infos(self) -> list[WorkerInfo]:
        infos = [replica.info for pool in self._pools for replica in pool.replicas if replica.info is not None]
        if not infos:
            raise NoReplicaError(role=" or ".join(self._links), retry_after_s=self.settings.retry_after_s)
        return infos

    def check_model(self, model: str | None) -> None:
        """Refuse another model's name; no name means the served model.

        Raises:
            UnknownModelError: Another model was asked for.
        """
        if model is not None and model not in self._names:
            raise UnknownModelError(model=model, served=self._names)

    def check_room(self, num_sequences: int) -> None:
        """Refuse sequences that cannot run now, before any work is done for them.

        Raises:
            QueueFullError: Too many are in progress.
        """
        self._orchestrator.check_room(num_sequences)

    def check_capacity(self) -> None:
        """Refuse if nobody can generate, or, if the settings forbid that, compute prompts alone.

        Raises:
            NoReplicaError: No replica could serve a request now.
        """
        needs_prefill = self.settings.prefill_lost_policy == "fail"
        for work, pool in ((Work.PROMPT, self.prefill_pool), (Work.STREAM, self.decode_pool)):
            if (needs_prefill or work is Work.STREAM) and not pool.expects_any(work):
                raise NoReplicaError(role=pool.role, retry_after_s=self.settings.retry_after_s)

    def generate(self, text: TextRequest) -> TextOutput:
        """Accept one request and start it; see ``generate_choices``."""
        return self.generate_choices([[text]])[0]

    def generate_choices(self, prompts: Sequence[Sequence[TextRequest]]) -> list[TextOutput]:
        """Accept and start all choices of some prompts, or none. Choices run where the first one of their prompt does.

        All choices come from one caller; the timeout and the session of the first one apply to all.

        Raises:
            NoReplicaError: No replica could run them now.
            QueueFullError: Too many requests are in progress or waiting.
        """
        asked = prompts[0][0]
        generations = self._orchestrator.start_choices(
            [[self._request(text, is_first=text is choices[0]) for text in choices] for choices in prompts],
            timeout_s=self.settings.default_timeout_s if asked.timeout_s is None else asked.timeout_s,
            session_id=asked.session_id,
            caller_id=asked.caller_id,
            origin=asked.origin,
        )
        outputs: list[TextOutput] = []
        remaining = iter(generations)
        for choices in prompts:
            leader: TextOutput | None = None
            for text in choices:
                generation = next(remaining)
                for found in (generation, *generation.others):
                    outputs.append(self._output(text, found, leader))
                    leader = leader or outputs[-1]
        return outputs

    def _request(self, text: TextRequest, *, is_first: bool) -> GenerateRequest:
        seed = secrets.randbits(63) if text.seed is None else text.seed % 2**63
        sampling = replace(text.sampling, seed=seed)
        if not is_first:
            # The prompt's log-probabilities are the same for all choices, so only the first one asks for them.
            sampling = replace(sampling, num_prompt_logprobs=None)
        return GenerateRequest(
            request_id=text.request_id,
            prompt_token_ids=text.prompt_token_ids,
            sampling=sampling,
            priority=text.priority,
            promise=text.promise,
            arrival_s=time.time(),
            cache_salt=text.cache_salt,
            prediction_token_ids=text.prediction_token_ids,
            owner=text.owner,
        )

    def _output(self, text: TextRequest, generation: Generation, leader: TextOutput | None) -> TextOutput:
        sampling = generation.request.sampling
        asks_for_logprobs = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
        generation.mailbox.joins_deltas = not text.stop and not asks_for_logprobs
        return TextOutput(
            generation,
            detokenizer=self._detokenizer_of(text),
            stops=StopStrings(text.stop, include=text.include_stop),
            metrics=self.metrics,
            skip_stop_token=not text.include_stop,
            shows_logprobs=text.shows_logprobs,
            is_prompt_only=text.is_prompt_only,
            leader=leader,
            turn=None if text.turn is None else text.turn.reader(),
        )

    def _detokenizer_of(self, text: TextRequest) -> Detokenizer:
        markers = () if text.turn is None else text.turn.markers
        ids = (self.tokenizer.added_token_id(marker) for marker in markers)
        return self._detokenizers.make(
            text.prompt_token_ids,
            skip_special_tokens=text.skip_special_tokens,
            shown=frozenset(token_id for token_id in ids if token_id is not None),
        )

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for the tokens that follow a prompt."""
        return self._detokenizers.make(prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def served_models(self) -> Sequence[str]:
        """The model names that requests may use."""
        return self._names

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_period_s())
            self._clock.tick()
            self.responses.store.drop_expired()
            try:
                await self._refresh(wait=False)
                self.live.look_if_due()
            except Exception:
                # A failed look-up of the members must not end this loop.
                logger.exception("refreshing the pools failed")

    def _refresh_period_s(self) -> float:
        return min(self.settings.report_period_s, self.settings.backoff_min_s) / 2

    async def _refresh(self, *, wait: bool) -> None:
        tasks = set().union(*(pool.refresh() for pool in self._pools))
        if wait and tasks:
            await asyncio.gather(*tasks)
        for link in dict.fromkeys(self._links.values()):
            link.follow()
