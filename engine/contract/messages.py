"""What goes into an engine and what comes out: the wire types between router and workers. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.logits_params import AllowedTokensParams, BadWordsParams, LogitBiasParams, PenaltyParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.stats import Gauges
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from engine.contract.token_ids import TokenIds
from engine.contract.tracing.request_timings import RequestTimings, TraceContext
from engine.versions import across_versions
from kv_transfer.params import KVStreamParams, KVTransferParams

TOO_MANY_BEAMS: Final = "too_many_beams"
"""The code of a refusal: the engine has no room for so many beams."""

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search instead of one token after the other. The names mean what they mean in transformers.

    ``width`` outputs are followed at the same time, and the ``num_results`` best ones are given. An output's score is
    the sum of its tokens' log-probabilities over ``length ** length_penalty``. ``early_stopping`` says when the search
    ends once ``width`` outputs are complete: True, at once; False, when no output that goes on has a better score at
    the length it has now; "never", when none can have a better one at any length.
    """

    width: int
    num_results: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def num_candidates(self, num_stop_ids: int) -> int:
        """Tokens of each beam that a step has to tell: as many that go on as there are beams are among them."""
        return max(2, 1 + num_stop_ids) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(LogitBiasParams, PenaltyParams, BadWordsParams, AllowedTokensParams):
    """How tokens are drawn. The defaults are greedy and neutral. What logits processors go by stands in the bases.

    ``seed`` is always set: whoever accepts a request draws one where the user gave none, so that every engine that
    works on it samples the same tokens. ``top_k`` 0 means all; ``min_p`` 0 and ``top_p`` 1 mean off.
    ``stop_token_ids`` end the output and are part of it; ``eos_token_ids`` do so unless ``ignore_eos``.
    ``min_tokens`` keeps both from being sampled before that many output tokens exist; where that and other rules leave
    nothing to draw, those about allowed tokens hold before it, and it before bad words.
    ``num_logprobs`` asks for the log-probability of every output token and of that many most likely ones beside it,
    ``num_prompt_logprobs`` for the same of the prompt; None asks for nothing.
    ``grammar`` is what the output's text must match, in the form that llguidance reads: Lark text, or its JSON.
    ``beams`` asks for a beam search, which draws nothing: its outputs come at its end, all at once.
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
        """The tokens that end the output."""
        ends_at_eos = not self.ignore_eos or self.grammar is not None
        return frozenset(self.stop_token_ids + (self.eos_token_ids if ends_at_eos else ()))

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.temperature == 0.0


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate.

    ``output_token_ids`` are tokens that were generated elsewhere (the prefill worker's first token, or all tokens
    sent before a move): they count as output, for limits and penalties alike, and are not emitted again.
    ``hand_over`` ends the request after its first new token, with its blocks under a lease (the prefill role).
    ``kv_transfer`` says where the KV of the prompt can be read from (the decode role). ``kv_stream`` makes it the
    notice of a request that is to come: its prompt is being computed there, and its KV can be read meanwhile. A notice
    has no answer but a refusal; the request itself comes under the same id, or is aborted.
    ``client_id`` is the front end that gets the tokens; ``cache_salt`` keeps prefixes of different users apart.
    Lower ``priority`` values are served first. ``arrival_s`` is the router's wall clock, for ordering.
    ``prediction_token_ids`` are what the caller expects of the output: where it comes true, it takes fewer steps.
    ``max_recomputed_tokens``: when more KV than that could not be loaded, the request ends with the error ``kv_lost``
    instead of being computed here; None computes it here, however much it is.
    ``promise`` bounds when its tokens should come. ``trace``: the engine tells what it spent its time on.
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


class FinishReason(StrEnum):
    """Why a request ended; after HANDED_OVER it goes on elsewhere."""

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
    """What the model thought where one token was chosen: natural logarithms of its own probabilities, before
    temperature, penalties and rules.

    ``token_ids[0]`` is the token itself, the others are the most likely ones, best first; ``logprobs`` are theirs.
    ``rank`` 1 is the most likely token of all.
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
        """One token's, with at most ``num_top`` others."""
        width = 1 + num_top
        ids, values = self.token_ids[index, :width].tolist(), self.logprobs[index, :width].tolist()
        return TokenLogprobs(tuple(ids), tuple(values), int(self.ranks[index]))


class DeltaLogprobs(NamedTuple):
    """Of a delta's tokens, where they were asked for, and with a request's first delta of its prompt.

    ``prompt`` begins with the prompt's second token: nothing predicts the first.
    """

    tokens: tuple[TokenLogprobs, ...] = ()
    prompt: LogprobTable | None = None


class BeamResult(NamedTuple):
    """An output that a beam search found. ``stop_token_id`` is the token that ended it; None where it is too long.

    ``cumulative_logprob`` is the sum of its tokens' log-probabilities, ``score`` what it was ranked by.
    """

    token_ids: tuple[int, ...]
    stop_token_id: int | None
    cumulative_logprob: float
    score: float


class TokenDelta(NamedTuple):
    """A request's new tokens of one step, and how it ended if it did.

    One is made, pickled and read again for every token of every request, hence a tuple: a frozen dataclass with slots
    costs several times as much (`benchmarks/scheduler.py` prints a step with its messages).

    The end of a request is reported exactly once. ``stop_token_id`` is the token that stopped it.
    ``num_cached_tokens`` counts the prompt tokens that needed no computing here, ``num_remote_tokens`` those of them
    whose KV came from another engine, ``queue_s`` is how long the request waited before it was first admitted; all are
    set on a request's first delta on this engine. ``beams`` are the outputs of a beam search, the best first; then the
    delta has no tokens of its own.
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
    """Consecutive deltas of one request, at least one, as one; none of them has log-probabilities."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Gauges):
    """What a worker says of itself with every message: gauges of its scheduler and its own, counters since its start.

    ``is_stalled``: it has work and makes no step any more. ``is_draining``: it takes no more requests, and will go.
    ``has_hung_read``: a read of KV hangs for good and holds blocks, so that it will go, too, as soon as it may.
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
        """True when no request is there, and no lease of one that ended."""
        return not (self.num_running or self.num_waiting or self.num_loading or self.num_leased_blocks)

    @property
    def unhealthy(self) -> str | None:
        """What is wrong with the worker, for people to read; None when nothing is."""
        if self.is_stalled:
            return "makes no steps"
        return "read hangs" if self.has_hung_read else None

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that is in use, 0 to 1; cached blocks that nobody uses count as free."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """What changed in an engine's prefix cache, for routers that mirror it.

    The changes are numbered since the engine started; these are ``first_sequence`` up to ``next_sequence`` (exclusive),
    each block with what became of it at last. A reader that knows the changes up to a smaller number than
    ``first_sequence`` missed some. A snapshot holds all that is cached: what was known before is void.
    ``stored`` and ``removed`` are joined keys (engine/contract/block_hash.py).
    """

    first_sequence: int
    next_sequence: int
    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """What a worker dropped when its prefix cache was reset: blocks that could be found in the cache, and in
    its tiers (``num_host_blocks``), and what running requests had computed, which are preempted and compute it again.
    """

    num_blocks: int = 0
    num_host_blocks: int = 0
    num_preempted: int = 0


class DraftCounts(NamedTuple):
    """Draft tokens of a request that a step verified, and how many of them became output."""

    request_id: str
    num_drafts: int
    num_accepted: int


Told: TypeAlias = RequestTimings | DraftCounts
"""What is told of a request beside its deltas: before its first token if it is traced, and of its draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """What one engine step brought for one front end: new tokens, the engine's load, changes of its prefix cache, and
    what is told of requests whose tokens are among the new ones.
    """

    deltas: tuple[TokenDelta, ...]
    load: LoadReport
    cache: tuple[CacheChanges, ...] = ()
    told: tuple[Told, ...] = ()


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What does not change during a worker's life.

    ``stream_chunk_tokens``: prompts longer than this are computed in several steps, and can be read meanwhile; 0: none.
    ``transport``: over what its KV travels, for people to read.
    ``num_threads`` compute on a CPU, ``thread_speedup`` times as fast as one of them (0: a GPU does), and with
    ``borrows_cores`` up to ``num_host_cores`` of them while other workers of the host are idle. Workers that share a
    GPU have a part each of ``shared_gpu``, which has ``num_host_cores`` of them. At most ``max_num_seqs`` requests run
    at a time; 0: it does not say.
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
        """Its own of ``num_host_cores``."""
        return 1 if self.shared_gpu else self.num_threads

    @property
    def shared_host(self) -> str:
        """Where it shares its cores or its GPU: workers for which this is the same; empty: nowhere."""
        return f"{self.node_ip} {self.shared_gpu}".rstrip() if self.num_host_cores else ""
