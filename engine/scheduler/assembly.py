"""Builds the scheduler's collaborators and connects them; what is switched off is not built. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.config import CacheConfig, SchedulerConfig
from engine.contract.grammar import GrammarCompiler
from engine.contract.stats import Counters
from engine.drafting.proposer import Drafting
from engine.scheduler.admission import Admission
from engine.scheduler.beam_rows import BeamRows
from engine.scheduler.blocks.cache_events import CacheEventLog
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.pending_prefixes import PendingPrefixes
from engine.scheduler.decode_steps import DecodeSteps
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.migration import Migration
from engine.scheduler.policy.draft_lengths import DraftLengths
from engine.scheduler.policy.gates import AdmissionGate, PartialPrefills, PromptDelay
from engine.scheduler.policy.grammar_gate import GrammarGate
from engine.scheduler.policy.preemption import ArtificialPreemption, PreemptionPolicy
from engine.scheduler.policy.prompt_budget import PromptBudget
from engine.scheduler.policy.step_timer import StepTimer
from engine.scheduler.priority_preemption import PriorityPreemption
from engine.scheduler.remote.announcer import Announcer
from engine.scheduler.remote.early_loads import EarlyLoads
from engine.scheduler.remote.leases import BlockLeases
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.remote.prefix_search import PrefixSearch
from engine.scheduler.remote_events import RemoteEvents
from engine.scheduler.request_validation import RequestValidator
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.running_pass import RunningPass
from engine.scheduler.speculation import Speculation
from engine.scheduler.step_draft import StepDraft
from engine.scheduler.step_output import StepOutputProcessor
from kv_transfer.connector import SchedulerConnector


class Preparation(Protocol):
    """Something that may change the state before a step is put together."""

    def prepare(self, draft: StepDraft, /) -> None:
        """Change what the step starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The mutable state. Each part has one owner, and each collaborator gets the parts that it needs."""

    counters: Counters
    cache_events: CacheEventLog | None
    kv_cache: KVCacheManager
    table: RowTable
    remote: RemoteKV
    search: PrefixSearch
    leases: BlockLeases
    early: EarlyLoads
    announcer: Announcer
    pending: PendingPrefixes
    live_requests: LiveRequests
    preemption: PreemptionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a scheduler is made of."""

    state: State
    validator: RequestValidator
    preparations: Sequence[Preparation]
    grammar_gate: GrammarGate | None
    running: RunningPass
    admission: Admission
    speculation: Speculation | None
    decode_steps: DecodeSteps | None
    step_output: StepOutputProcessor
    beams: BeamRows
    remote_events: RemoteEvents
    prompt_delay: PromptDelay | None
    timer: StepTimer
    prompt_budget: PromptBudget | None
    migration: Migration


def assemble(
    config: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    windows: Sequence[int | None],
    connector: SchedulerConnector | None,
    clock: Callable[[], float],
    gates: Sequence[AdmissionGate],
    drafting: Drafting | None = None,
    grammars: GrammarCompiler | None = None,
) -> Parts:
    """Build all parts; ``config`` was checked against the cache before."""
    state = _state(
        config,
        cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        windows=windows,
        connector=connector,
        clock=clock,
    )
    delay = _prompt_delay(config, state, clock)
    partial_prefills = _partial_prefills(config, cache, state)
    all_gates = [gate for gate in (delay, partial_prefills, *gates) if gate is not None]
    admission = _admission(config, state, all_gates, clock)
    running = _running(config, state, partial_prefills)
    timer = StepTimer(clock=clock)
    prompt_budget = _prompt_budget(config, state, timer, clock)
    draft_lengths = DraftLengths(clock=clock) if drafting is not None and drafting.is_adaptive else None
    beams = _beams(state, running)
    step_output = _step_output(state, beams, draft_lengths)
    grammar_gate = _grammar_gate(grammars, state, clock)
    return Parts(
        state=state,
        validator=_validator(config, state, grammar_gate, max_model_len=max_model_len, clock=clock),
        preparations=_preparations(config, state, admission, partial_prefills, prompt_budget),
        grammar_gate=grammar_gate,
        running=running,
        admission=admission,
        speculation=_speculation(config, drafting, state, running, draft_lengths),
        decode_steps=_decode_steps(config, state, running),
        step_output=step_output,
        beams=beams,
        remote_events=_remote_events(config, state, step_output),
        prompt_delay=delay,
        timer=timer,
        prompt_budget=prompt_budget,
        migration=Migration(
            table=state.table, live_requests=state.live_requests, remote=state.remote, counters=state.counters
        ),
    )


def _state(
    config: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    windows: Sequence[int | None],
    connector: SchedulerConnector | None,
    clock: Callable[[], float],
) -> State:
    cache_events = CacheEventLog(config.cache_event_capacity) if config.enable_cache_events else None
    kv_cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        windows=windows,
        chunk_tokens=config.most_tokens_of_request,
        events=cache_events,
        tier=connector.tier if connector is not None else None,
        clock=clock,
    )
    table = RowTable(
        max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, block_size=cache.block_size, windows=windows
    )
    source, producer, consumer = (
        (connector.source, connector.producer, connector.consumer) if connector is not None else (None, None, None)
    )
    remote, leases = RemoteKV(source, consumer, num_groups=len(windows)), BlockLeases(producer)
    pending, counters = PendingPrefixes(), Counters()
    early = EarlyLoads(consumer, kv_cache=kv_cache, max_num=config.max_num_seqs, clock=clock)
    announcer = Announcer(producer, table=table)
    live_requests = LiveRequests(
        policy=config.policy,
        table=table,
        kv_cache=kv_cache,
        remote=remote,
        leases=leases,
        pending=pending,
        announcer=announcer,
        counters=counters,
    )
    return State(
        counters=counters,
        cache_events=cache_events,
        kv_cache=kv_cache,
        table=table,
        remote=remote,
        search=PrefixSearch(kv_cache, remote),
        leases=leases,
        early=early,
        announcer=announcer,
        pending=pending,
        live_requests=live_requests,
        preemption=PreemptionPolicy(config.policy),
    )


def _admission(
    config: SchedulerConfig, state: State, gates: Sequence[AdmissionGate], clock: Callable[[], float]
) -> Admission:
    return Admission(
        config,
        table=state.table,
        kv_cache=state.kv_cache,
        live_requests=state.live_requests,
        remote=state.remote,
        search=state.search,
        pending=state.pending,
        early=state.early,
        announcer=state.announcer,
        counters=state.counters,
        gates=gates,
        clock=clock,
    )


def _grammar_gate(grammars: GrammarCompiler | None, state: State, clock: Callable[[], float]) -> GrammarGate | None:
    if grammars is None:
        return None
    return GrammarGate(grammars, live_requests=state.live_requests, clock=clock)


def _validator(
    config: SchedulerConfig,
    state: State,
    grammars: GrammarGate | None,
    *,
    max_model_len: int,
    clock: Callable[[], float],
) -> RequestValidator:
    kv_cache, chunk_tokens = state.kv_cache, config.most_tokens_of_request

    def max_beam_tokens(num_prompt_tokens: int, width: int) -> int:
        return kv_cache.needs.max_beam_tokens(
            num_prompt_tokens=num_prompt_tokens,
            width=width,
            num_blocks=kv_cache.num_blocks,
            max_tokens=max_model_len,
        )

    return RequestValidator(
        config,
        live_requests=state.live_requests,
        remote=state.remote,
        early=state.early,
        max_model_len=max_model_len,
        max_kv_tokens=kv_cache.groups.max_tokens(kv_cache.num_blocks, chunk_tokens=chunk_tokens),
        max_beam_tokens=max_beam_tokens,
        has_connector=state.remote.can_load,
        grammars=grammars,
        clock=clock,
    )


def _beams(state: State, running: RunningPass) -> BeamRows:
    return BeamRows(
        table=state.table,
        kv_cache=state.kv_cache,
        live_requests=state.live_requests,
        running=running,
        preemption=state.preemption,
        counters=state.counters,
    )


def _step_output(state: State, beams: BeamRows, draft_lengths: DraftLengths | None) -> StepOutputProcessor:
    return StepOutputProcessor(
        table=state.table,
        kv_cache=state.kv_cache,
        live_requests=state.live_requests,
        pending=state.pending,
        announcer=state.announcer,
        counters=state.counters,
        beams=beams,
        draft_lengths=draft_lengths,
    )


def _remote_events(config: SchedulerConfig, state: State, step_output: StepOutputProcessor) -> RemoteEvents:
    return RemoteEvents(
        config,
        kv_cache=state.kv_cache,
        live_requests=state.live_requests,
        remote=state.remote,
        early=state.early,
        leases=state.leases,
        step_output=step_output,
        counters=state.counters,
    )


def _speculation(
    config: SchedulerConfig,
    drafting: Drafting | None,
    state: State,
    running: RunningPass,
    lengths: DraftLengths | None,
) -> Speculation | None:
    if drafting is None:
        return None
    return Speculation(
        drafting,
        table=state.table,
        running=running,
        lengths=lengths,
        may_hold_back=config.async_scheduling == "auto",
    )


def _decode_steps(config: SchedulerConfig, state: State, running: RunningPass) -> DecodeSteps | None:
    if config.max_decode_steps == 1:
        return None
    return DecodeSteps(
        config.max_decode_steps,
        cuts=config.cuts_decode_steps,
        table=state.table,
        running=running,
        live_requests=state.live_requests,
        remote=state.remote,
    )


def _prompt_delay(config: SchedulerConfig, state: State, clock: Callable[[], float]) -> PromptDelay | None:
    if not config.scheduler_delay_factor:
        return None
    return PromptDelay(config.scheduler_delay_factor, table=state.table, clock=clock)


def _partial_prefills(config: SchedulerConfig, cache: CacheConfig, state: State) -> PartialPrefills | None:
    if not config.max_num_partial_prefills:
        return None
    return PartialPrefills(
        config, table=state.table, live_requests=state.live_requests, share_in_blocks=cache.enable_prefix_caching
    )


def _running(config: SchedulerConfig, state: State, partial_prefills: PartialPrefills | None) -> RunningPass:
    return RunningPass(
        config,
        table=state.table,
        kv_cache=state.kv_cache,
        live_requests=state.live_requests,
        early=state.early,
        preemption=state.preemption,
        partial_prefills=partial_prefills,
    )


def _prompt_budget(
    config: SchedulerConfig, state: State, timer: StepTimer, clock: Callable[[], float]
) -> PromptBudget | None:
    if not config.enable_chunked_prefill:
        return None  # prompts are computed whole, and cannot be limited
    return PromptBudget(
        config,
        table=state.table,
        live_requests=state.live_requests,
        remote=state.remote,
        search=state.search,
        timer=timer,
        clock=clock,
    )


def _preparations(
    config: SchedulerConfig,
    state: State,
    admission: Admission,
    partial_prefills: PartialPrefills | None,
    prompt_budget: PromptBudget | None,
) -> list[Preparation]:
    preparations: list[Preparation] = [] if prompt_budget is None else [prompt_budget]
    if config.artificial_preemption_probability and config.max_num_artificial_preemptions:
        preparations.append(
            ArtificialPreemption(
                config, table=state.table, live_requests=state.live_requests, preemption=state.preemption
            )
        )
    if config.enable_priority_preemption:
        preparations.append(
            PriorityPreemption(
                config,
                table=state.table,
                kv_cache=state.kv_cache,
                live_requests=state.live_requests,
                admission=admission,
                preemption=state.preemption,
                partial_prefills=partial_prefills,
            )
        )
    if partial_prefills is not None:
        preparations.append(partial_prefills)
    return preparations
