"""Builds the scheduler's collaborators and connects them; options that are off are not built. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config import CacheConfig, SchedulerConfig
from engine.core.admission import Admission
from engine.core.admission_gate import AdmissionGate
from engine.core.artificial_preemption import ArtificialPreemption
from engine.core.cache_events import CacheEventLog
from engine.core.counters import Counters
from engine.core.door import Door
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.lease_book import LeaseBook
from engine.core.outcome import Outcome
from engine.core.partial_prefills import PartialPrefills
from engine.core.pending_prefixes import PendingPrefixes
from engine.core.preemption import PreemptionPolicy
from engine.core.priority_preemption import PriorityPreemption
from engine.core.prompt_delay import PromptDelay
from engine.core.remote_events import RemoteEvents
from engine.core.remote_kv import RemoteKV
from engine.core.request_book import RequestBook
from engine.core.row_table import RowTable
from engine.core.running_pass import RunningPass
from engine.core.step_draft import StepDraft
from kv_transfer.connector import SchedulerConnector


class Preparation(Protocol):
    """Something that looks at the state before a step is put together."""

    def prepare(self, draft: StepDraft) -> None:
        """Change what the step starts from."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a scheduler is made of."""

    counters: Counters
    kv_cache: KVCacheManager
    cache_events: CacheEventLog | None
    table: RowTable
    book: RequestBook
    remote: RemoteKV
    leases: LeaseBook
    door: Door
    running: RunningPass
    admission: Admission
    outcome: Outcome
    remote_events: RemoteEvents
    preparations: Sequence[Preparation]
    prompt_delay: PromptDelay | None


def assemble(
    config: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    connector: SchedulerConnector | None,
    clock: Callable[[], float],
    gates: Sequence[AdmissionGate],
) -> Parts:
    """Build everything; ``config`` was checked against the cache."""
    cache_events = CacheEventLog(config.cache_event_capacity) if config.enable_cache_events else None
    counters, pending = Counters(), PendingPrefixes()
    remote, leases = RemoteKV(connector), LeaseBook(connector)
    preemption = PreemptionPolicy(config.policy)
    kv_cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        events=cache_events,
        clock=clock,
    )
    table = RowTable(max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, block_size=cache.block_size)
    book = RequestBook(
        policy=config.policy,
        table=table,
        kv_cache=kv_cache,
        remote=remote,
        leases=leases,
        pending=pending,
        counters=counters,
    )
    partial_prefills = _partial_prefills(config, cache, table, book)
    delay = (
        PromptDelay(config.scheduler_delay_factor, table=table, clock=clock) if config.scheduler_delay_factor else None
    )
    admission = Admission(
        config,
        table=table,
        kv_cache=kv_cache,
        book=book,
        remote=remote,
        pending=pending,
        counters=counters,
        gates=[gate for gate in (delay, partial_prefills, *gates) if gate is not None],
        clock=clock,
    )
    outcome = Outcome(table=table, kv_cache=kv_cache, book=book, pending=pending, counters=counters)
    preparations: list[Preparation] = []
    if config.artificial_preemption_probability and config.max_num_artificial_preemptions:
        preparations.append(ArtificialPreemption(config, table=table, book=book, preemption=preemption))
    if config.enable_priority_preemption:
        preparations.append(
            PriorityPreemption(table=table, kv_cache=kv_cache, book=book, admission=admission, preemption=preemption)
        )
    if partial_prefills is not None:
        preparations.append(partial_prefills)
    return Parts(
        counters=counters,
        kv_cache=kv_cache,
        cache_events=cache_events,
        table=table,
        book=book,
        remote=remote,
        leases=leases,
        door=Door(
            config,
            book=book,
            remote=remote,
            max_model_len=max_model_len,
            max_kv_tokens=num_blocks * cache.block_size,
            has_connector=connector is not None,
            clock=clock,
        ),
        running=RunningPass(
            config,
            table=table,
            kv_cache=kv_cache,
            book=book,
            preemption=preemption,
            partial_prefills=partial_prefills,
        ),
        admission=admission,
        outcome=outcome,
        remote_events=RemoteEvents(
            config,
            kv_cache=kv_cache,
            book=book,
            remote=remote,
            leases=leases,
            outcome=outcome,
            counters=counters,
        ),
        preparations=preparations,
        prompt_delay=delay,
    )


def _partial_prefills(
    config: SchedulerConfig, cache: CacheConfig, table: RowTable, book: RequestBook
) -> PartialPrefills | None:
    if not config.max_num_partial_prefills:
        return None
    return PartialPrefills(config, table=table, book=book, share_in_blocks=cache.enable_prefix_caching)
