"""A request as the scheduler knows it. What changes in every step of a running one is kept in the row table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from engine.contract.block_hash import BlockHash, hash_chain, prompt_root
from engine.contract.grammar import CompiledGrammar, GrammarFollower
from engine.contract.messages import GenerateRequest, LogprobTable
from engine.contract.prediction.follower import PredictionFollower
from engine.contract.step import IntArray, PromptLogprobsChunk
from engine.scheduler.beams.group import BeamGroup
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.timeline import Timeline
from kv_transfer.cache_groups import BlockTables
from kv_transfer.params import KVTransferParams


class PromptLogprobs:
    """Collects the log-probabilities of one prompt; chunks of a prompt that is computed again replace old ones."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_tokens = num_prompt_tokens - 1
        self._num_done = 0
        self._table: LogprobTable | None = None

    def add(self, chunk: PromptLogprobsChunk) -> None:
        """Take in a chunk; chunks come in order of position, and from the start again after a preemption."""
        table = self._table
        if table is None:
            shape = (self._num_tokens, chunk.table.token_ids.shape[1])
            table = self._table = LogprobTable(
                token_ids=np.empty(shape, np.int32),
                logprobs=np.empty(shape, np.float32),
                ranks=np.empty(self._num_tokens, np.int32),
            )
        start = chunk.start - 1
        end = start + len(chunk.table.ranks)
        for mine, theirs in zip(table, chunk.table, strict=True):
            mine[start:end] = theirs
        self._num_done = end

    def table(self) -> LogprobTable:
        """All chunks together; empty for a prompt of one token.

        Raises:
            AssertionError: A chunk is missing.
        """
        if self._num_tokens == 0:
            empty = np.empty((0, 1), np.int32)
            return LogprobTable(token_ids=empty, logprobs=empty.astype(np.float32), ranks=empty[:, 0])
        assert self._table is not None
        assert self._num_done == self._num_tokens, f"{self._num_done} of {self._num_tokens} prompt tokens"
        return self._table


class RequestState(Enum):
    """The state of a request. FINISHED is the last one."""

    WAITING = auto()
    LOADING = auto()
    READY = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start`` to ``end`` (exclusive)."""

    start: int
    end: int


class Request:
    """One request on this engine, from its arrival to its end.

    token_ids: all known tokens, while the request has no row; a running one's are in the row table.
    block_tables: one block table per KV cache group, while the request is loading or ready.
    num_computed_tokens, invalid_spans: where computing begins when it gets a row; the spans are damaged ranges before
        that position, in order.
    num_preempted_tokens: how many tokens were computed at its last preemption, while it still waits after that.
    queue_s: its time in the queue; None until it is first admitted.
    confirmed_blocks: indices of blocks after an invalid span that a load already published.
    num_passed_by: how many requests were served before it while it was the first prompt in the queue.
    is_deferred: its promise cannot be kept, so others pass it while it waits.
    is_load_lost: a load brought nothing usable, and no other one is begun for it.
    full_limit, limit: the total length at which the output ends, and at which this engine's part of it ends (a
        hand-over ends after one token).
    grammar, grammar_follower: the compiled grammar, once there is one, and what tells which drafts fit it, from the
        first drafts on.
    prompt_logprobs: collects what was asked for about the prompt, on the engine that samples the first token.
    prediction: follows the output along the caller's prediction; None without one, or where this engine produces only
        one token.
    timeline: records steps and loads until the first token; None where the request is not traced.
    beams: its beam search, if it asks for one. During the search it has ``more_rows`` besides ``row``, and
        ``token_ids`` stays the prompt.
    """

    __slots__ = (
        "arrival_index",
        "beams",
        "block_hashes",
        "block_tables",
        "client_id",
        "confirmed_blocks",
        "full_limit",
        "grammar",
        "grammar_follower",
        "invalid_spans",
        "is_deferred",
        "is_load_lost",
        "is_unanswered",
        "kv_transfer",
        "limit",
        "message",
        "more_rows",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_passed_by",
        "num_preempted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_remote_tokens",
        "prediction",
        "prompt_logprobs",
        "queue_s",
        "queued_at_s",
        "request_id",
        "root",
        "row",
        "state",
        "stop_ids",
        "timeline",
        "token_ids",
    )

    def __init__(self, message: GenerateRequest, *, arrival_index: int, full_limit: int, queued_at_s: float) -> None:
        sampling = message.sampling
        self.message = message
        self.request_id = message.request_id
        self.client_id = message.client_id
        self.arrival_index = arrival_index
        self.queued_at_s = queued_at_s
        self.state = RequestState.WAITING
        self.num_passed_by = 0
        self.row: int | None = None
        self.more_rows: tuple[int, ...] = ()
        self.token_ids = _known_tokens(message)
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.full_limit = full_limit
        self.limit = min(full_limit, self.num_tokens + 1) if message.hand_over else full_limit
        self.stop_ids = sampling.all_stop_ids
        self.beams: BeamGroup | None = None
        if sampling.beams is not None:
            max_tokens = full_limit - self.num_prompt_tokens
            self.beams = BeamGroup(sampling, max_tokens=max_tokens)
        self.grammar: CompiledGrammar | None = None
        self.grammar_follower: GrammarFollower | None = None
        self.root: BlockHash = prompt_root(message.cache_salt)
        self.block_hashes: list[BlockHash] = []
        self.block_tables: BlockTables = []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.confirmed_blocks: set[int] = set()
        self.invalid_spans: list[Span] = []
        self.kv_transfer: KVTransferParams | None = message.kv_transfer
        self.num_preempted_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_remote_tokens = 0
        self.queue_s: float | None = None
        self.is_unanswered = True
        self.is_load_lost = False
        self.is_deferred = False
        self.timeline: Timeline | None = None
        is_first = not message.output_token_ids and message.kv_transfer is None and message.kv_stream is None
        wants_prompt = sampling.num_prompt_logprobs is not None and is_first
        predicted = None if message.hand_over else message.prediction_token_ids
        self.prediction = PredictionFollower(predicted) if predicted else None
        self.prompt_logprobs = PromptLogprobs(self.num_prompt_tokens) if wants_prompt else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many most likely tokens the runner tells for each prompt position; None when this is not (or no longer)
        needed.

        If it is not None, every position is computed here, because cached KV has no logits.
        """
        return self.message.sampling.num_prompt_logprobs if self.prompt_logprobs and self.is_unanswered else None

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output, of a request that has no row."""
        return int(self.token_ids.size)

    @property
    def first_stop(self) -> int:
        """The least total length at which stop tokens count.

        With a grammar they count from the start: before ``min_tokens`` they are sampled only if nothing else fits, and
        then the output is complete.
        """
        sampling = self.message.sampling
        return self.num_prompt_tokens + (1 if sampling.grammar is not None else max(sampling.min_tokens, 1))

    @property
    def promised_gap(self) -> int:
        """The promised gap between two tokens in microseconds, in the form of the row table."""
        itl_ms = self.message.promise.itl_ms
        return row_passes.NO_GAP if itl_ms is None else min(math.ceil(itl_ms * 1e3), row_passes.NO_GAP)

    @property
    def rows(self) -> tuple[int, ...]:
        """All its rows."""
        return () if self.row is None else (self.row, *self.more_rows)

    @property
    def num_rows(self) -> int:
        """How many rows it has, or may need, while it runs."""
        beams, has_steps = self.message.sampling.beams, self.limit > self.num_prompt_tokens + 1
        return beams.width if beams is not None and has_steps else 1

    @property
    def hands_over_first(self) -> bool:
        """True when its output continues on another engine after this engine's part."""
        return self.message.hand_over and self.limit < self.full_limit

    @property
    def is_waiting(self) -> bool:
        """True while it holds nothing here."""
        return self.state is RequestState.WAITING

    @property
    def is_finished(self) -> bool:
        """True once its end was reported."""
        return self.state is RequestState.FINISHED

    def num_computed_before(self, end: int) -> int:
        """How many of its first ``end`` positions need no computing; only while it has no row."""
        num_missing = sum(
            max(min(invalid_span.end, end) - invalid_span.start, 0) for invalid_span in self.invalid_spans
        )
        return min(self.num_computed_tokens, end) - num_missing

    def hashes(self, block_size: int) -> list[BlockHash]:
        """Addresses of all full blocks of the known tokens, computed once; only while it has no row."""
        num_full = self.num_tokens // block_size
        known = self.block_hashes
        if len(known) < num_full:
            parent = known[-1] if known else self.root
            known.extend(hash_chain(parent, self.token_ids[len(known) * block_size :], block_size))
        return known


def _known_tokens(message: GenerateRequest) -> IntArray:
    """Prompt and output so far. Without output, a view of the message's bytes, which must not be written."""
    prompt = message.prompt_token_ids.array
    return (
        np.concatenate((prompt, np.array(message.output_token_ids, np.int32))) if message.output_token_ids else prompt
    )
