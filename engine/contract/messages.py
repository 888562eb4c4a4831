"""What goes into an engine and what comes out of it: the wire types between router and workers. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.logits_params import LogitsParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.stats import Gauges
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from engine.contract.token_ids import TokenIds
from engine.contract.tracing.request_timings import RequestTimings, TraceContext
from engine.versions import across_versions, named_across_versions
from kv_transfer.params import KVStreamParams, KVTransferParams

TOO_MANY_BEAMS: Final = "too_many_beams"
"""Code of a refusal because the engine has no room for that many beams."""

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search, in place of sampling token by token. The names mean the same as in transformers.

    ``width`` outputs are followed at the same time, and the best ``num_results`` are returned. An output's score is the
    sum of its tokens' log-probabilities divided by ``length ** length_penalty``. ``early_stopping`` says when the
    search ends once ``width`` outputs are complete. True: at once. False: when no running output has a better score at
    its present length. "never": when none can reach a better score at any length.
    """

    width: int
    num_results: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def num_candidates(self, num_stop_ids: int) -> int:
        """How many candidates a step must tell of each beam, so that ``width`` of them are no stop tokens."""
        return self.width + num_stop_ids


@named_across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(LogitsParams):
    """How tokens are sampled. The defaults are greedy and neutral. The base class holds the logits processors'
    parameters.

    seed: always set. Whoever accepts a request draws a seed if the user gave none, so that every engine that works on
        the request samples the same tokens.
    top_k, min_p, top_p: 0 means all tokens; 0 and 1 mean off.
    stop_token_ids, eos_token_ids: end the output and are part of it; the latter not with ``ignore_eos``.
    min_tokens: neither is sampled before this many output tokens exist. If the rules leave nothing to sample, allowed
        tokens take precedence over this rule, and this rule over bad words and repeated tokens.
    num_logprobs: asks for the log-probability of every output token, and of this many most likely other tokens; None
        asks for nothing.
    num_prompt_logprobs: the same for the prompt.
    grammar: what the output's text must match, in llguidance's form: Lark text, or its JSON.
    beams: asks for a beam search, which samples nothing; its outputs come all at once, at its end.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str | None = None
    beams: BeamParams | None = None

    @property
    def all_stop_ids(self) -> frozenset[int]:
        """Every token that ends the output."""
        ends_at_eos = not self.ignore_eos or self.grammar is not None
        return frozenset(self.stop_token_ids + (self.eos_token_ids if ends_at_eos else ()))

    @property
    def is_greedy(self) -> bool:
        """True when always the most likely token is taken."""
        return self.temperature == 0.0


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate.

    request_id: names one run of a request at this engine. If the request comes back, its router gives it another id,
        so that an abort that comes late, or late tokens, of the earlier run do not concern the new one.
    output_token_ids: tokens generated elsewhere: the prefill worker's first token, or all tokens sent before a move.
        They count as output, for limits and penalties too, and are not emitted again.
    hand_over: end the request after its first new token, with its blocks under a lease (the prefill role).
    kv_transfer: where the KV of the prompt can be read from (the decode role).
    kv_stream: makes this the early notice of a request: its prompt is being computed elsewhere, and its KV can be read
        meanwhile. A notice gets no answer but a refusal; the request itself follows under the same id, or is aborted.
    client_id: the front end that gets the tokens.
    cache_salt: keeps prefixes of different users apart.
    priority: lower values are served first.
    arrival_s: the router's wall clock, for ordering.
    prediction_token_ids: what the caller expects as output; where it is right, the output takes fewer steps.
    max_recomputed_tokens: if more KV than this could not be loaded, the request ends with the error ``kv_lost`` instead
        of being computed here; None: it is always computed here.
    promise: bounds when its tokens should come.
    trace: the engine reports what it spent its time on.
    owner: those with the same owner share turns with the others where turns are shared: when grammars are compiled.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_s: float = 0.0
    client_id: str = ""
    hand_over: bool = False
    kv_transfer: KVTransferParams | None = None
    kv_stream: KVStreamParams | None = None
    cache_salt: str | None = None
    prediction_token_ids: TokenIds | None = None
    max_recomputed_tokens: int | None = None
    promise: Promise = NO_PROMISE
    trace: TraceContext | None = None
    owner: str = ""


class FinishReason(StrEnum):
    """Why a request ended; after HANDED_OVER it continues on another engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OVER = "handed_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """Why a request failed: a stable code for machines, a sentence for people."""

    code: str
    message: str


class TokenLogprobs(NamedTuple):
    """Log-probabilities where one token was chosen: natural logarithms of the model's own probabilities, before
    temperature, penalties and rules.

    ``token_ids[0]`` is the chosen token, the others are the most likely ones, best first; ``logprobs`` belong to them.
    ``rank`` is the chosen token's; 1 is the most likely token of all.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class LogprobTable(NamedTuple):
    """``TokenLogprobs`` of many tokens: token_ids, logprobs [num_tokens, 1 + num_top]; ranks [num_tokens]."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def entry(self, index: int, num_top: int) -> TokenLogprobs:
        """The entry of one token, with at most ``num_top`` others."""
        width = 1 + num_top
        ids, values = self.token_ids[index, :width].tolist(), self.logprobs[index, :width].tolist()
        return TokenLogprobs(tuple(ids), tuple(values), int(self.ranks[index]))


class DeltaLogprobs(NamedTuple):
    """Log-probabilities of a delta's tokens, where requested; a request's first delta also has those of its prompt.

    ``prompt`` begins with the prompt's second token, because nothing predicts the first one.
    """

    tokens: tuple[TokenLogprobs, ...] = ()
    prompt: LogprobTable | None = None


class BeamResult(NamedTuple):
    """An output that a beam search found. ``stop_token_id`` is the token that ended it; None if it reached a length
    limit.

    ``cumulative_logprob`` is the sum of its tokens' log-probabilities, ``score`` is what it was ranked by.
    """

    token_ids: tuple[int, ...]
    stop_token_id: int | None
    cumulative_logprob: float
    score: float


class TokenDelta(NamedTuple):
    """A request's new tokens of one step, and how it ended if it did.

    A tuple, because one is made, pickled and read for every token of every request: a frozen dataclass with slots costs
    several times as much (`benchmarks/scheduler.py` prints a step with its messages).

    The end of a request is reported exactly once. ``stop_token_id`` is the token that stopped it. A request's first
    delta on this engine has three more fields: ``num_cached_tokens`` counts the prompt tokens that needed no computing
    here, ``num_remote_tokens`` those of them whose KV came from another engine, and ``queue_s`` is how long the request
    waited before it was first admitted. ``beams`` are the outputs of a beam search, best first; such a delta has no
    tokens of its own.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: RequestError | None = None
    kv_transfer: KVTransferParams | None = None
    num_cached_tokens: int | None = None
    num_remote_tokens: int | None = None
    logprobs: DeltaLogprobs | None = None
    queue_s: float | None = None
    beams: tuple[BeamResult, ...] = ()


def joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """One delta for consecutive ones of a request; at least one must be given, none with log-probabilities."""
    first, last = deltas[0], deltas[-1]
    return TokenDelta(
        last.request_id,
        tuple([token_id for delta in deltas for token_id in delta.token_ids]),
        last.finish_reason,
        last.stop_token_id,
        last.error,
        last.kv_transfer,
        first.num_cached_tokens,
        first.num_remote_tokens,
        None,
        first.queue_s,
    )


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Gauges):
    """What a worker reports of itself with every message: gauges of its scheduler, its own state, counters since its
    start.

    ``is_stalled``: it has work but makes no steps. ``is_draining``: it takes no more requests, and will leave.
    ``has_hung_read``: a read of KV hangs for good and holds blocks, so it will leave, too, as soon as it may.
    ``num_peers`` are the workers that its connector has met. ``step_time`` predicts its steps. ``leaning`` is the role
    whose work it prefers now; empty: that of its pool.
    """

    num_peers: int = 0
    is_stalled: bool = False
    is_draining: bool = False
    counters: dict[str, float] = field(default_factory=dict)
    has_hung_read: bool = False
    step_time: StepTimeModel = UNKNOWN_STEP_TIME
    leaning: str = ""

    @property
    def is_empty(self) -> bool:
        """True when it has no requests, and no leases of ended ones."""
        return not (self.num_running or self.num_waiting or self.num_loading or self.num_leased_blocks)

    @property
    def unhealthy(self) -> str | None:
        """What is wrong with the worker, in words for people; None when nothing is."""
        if self.is_stalled:
            return "makes no steps"
        return "read hangs" if self.has_hung_read else None

    @property
    def kv_usage(self) -> float:
        """The share of blocks in use, 0 to 1; cached blocks that nobody holds count as free."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """What changed in an engine's prefix cache, for routers that mirror it.

    Changes are numbered since the engine started. These are numbers ``first_sequence`` to ``next_sequence``
    (exclusive), reduced to the final state of each block. A reader that knows only the changes before a number smaller
    than ``first_sequence`` has missed some. A snapshot holds all that is cached, and replaces what was known before.
    ``stored`` and ``removed`` are joined keys (engine/contract/block_hash.py).
    """

    first_sequence: int
    next_sequence: int
    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """What a worker dropped when its prefix cache was reset.

    ``num_blocks`` and ``num_host_blocks`` could be found in the cache and in its tiers until then. ``num_preempted``
    requests were preempted, and compute their KV again.
    """

    num_blocks: int = 0
    num_host_blocks: int = 0
    num_preempted: int = 0


class DraftCounts(NamedTuple):
    """How many draft tokens of a request a step verified, and how many of them became output."""

    request_id: str
    num_drafts: int
    num_accepted: int


Told: TypeAlias = RequestTimings | DraftCounts
"""What is reported of a request besides its deltas: timings with its first token if traced, and draft counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """What one engine step has for one front end: new tokens, the engine's load, changes of its prefix cache, and
    reports on requests whose tokens are among the new ones.
    """

    deltas: tuple[TokenDelta, ...]
    load: LoadReport
    cache: tuple[CacheChanges, ...] = ()
    told: tuple[Told, ...] = ()


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What never changes during a worker's life.

    stream_chunk_tokens: longer prompts are computed in several steps, and can be read meanwhile; 0: none can.
    transport: how its KV travels, in words for people.
    num_threads: how many threads compute on a CPU; 0 where a GPU does.
    thread_speedup: how many times as fast as one thread they are.
    borrows_cores, num_host_cores: it uses up to this many cores of its host while other workers there are idle. Where
        workers share a GPU, ``num_host_cores`` is the number of parts.
    shared_gpu: the GPU that it shares with others; each of them has one part.
    max_num_seqs: the most requests that run at a time; 0: it does not say.
    """

    role: str
    engine_id: str
    incarnation: str
    node_ip: str
    pid: int
    model_name: str
    block_size: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    device: str
    dtype: str
    stream_chunk_tokens: int = 0
    transport: str = ""
    num_threads: int = 0
    thread_speedup: float = 0.0
    borrows_cores: bool = False
    num_host_cores: int = 0
    max_num_seqs: int = 0
    shared_gpu: str = ""

    @property
    def num_own_cores(self) -> int:
        """How many of ``num_host_cores`` are its own."""
        return 1 if self.shared_gpu else self.num_threads

    @property
    def shared_host(self) -> str:
        """The host or GPU that it shares with the workers that have the same value; empty where it shares none."""
        return f"{self.node_ip} {self.shared_gpu}".rstrip() if self.num_host_cores else ""
