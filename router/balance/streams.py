"""The live streams of this router, by the worker that generates them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from router.pool.demand import Demand


class MoveReason(StrEnum):
    """Why a stream is moved: its worker would be too slow between tokens, has hardly any KV blocks left, or is behind
    with its waiting prompts; or an operator ordered it."""

    GAP = "gap"
    KV = "kv"
    QUEUE = "queue"
    ORDER = "order"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """An order to leave a worker. ``target`` is where the stream should continue; None leaves that to the policy."""

    target: str | None
    reason: MoveReason
    ordered_at_s: float


def was_given_back(final: TokenDelta) -> bool:
    """True if a replica gave back a prompt that was still waiting."""
    return final.finish_reason is FinishReason.HANDED_OVER and not final.token_ids and final.kv_transfer is None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveStream:
    """One stream's stay at one worker. ``output_token_ids`` are all its tokens so far; the list grows.

    ``num_moves``: how often it was ordered to leave a worker before. ``order`` is set once it was ordered to leave this
    worker, and becomes ``late_order`` when a worker takes so long to follow that other moves no longer wait for it.
    ``prompt`` is what the worker has to compute before the first token; None if another worker computes it, or once its
    computation has begun. ``first_due_s``: when its first token is promised, if it is. ``is_handed_over``: only its
    prompt is computed here; ``goes_on_at`` is the worker that generates, if known.
    """

    request: GenerateRequest
    output_token_ids: Sequence[int]
    replica_id: str
    since_s: float
    num_tokens_before: int
    num_moves: int = 0
    order: MoveOrder | None = None
    late_order: MoveOrder | None = None
    prompt: Demand | None = None
    first_due_s: float = math.inf
    is_handed_over: bool = False
    goes_on_at: str | None = None

    @property
    def num_context_tokens(self) -> int:
        """Prompt and output tokens so far: the KV that each of its steps reads, and that a move copies."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_waiting(self) -> bool:
        """True for a prompt without a token and without an order. Never for beams: their tokens come at the end."""
        is_open = self.prompt is not None and self.order is None and not self.output_token_ids
        return is_open and self.request.sampling.beams is None

    def order_of(self, final: TokenDelta) -> MoveOrder | None:
        """The order that the worker followed with ``final``; None if it left the stream for a drain. A late order can
        only be that of a prompt that still waited."""
        return self.order or (self.late_order if was_given_back(final) else None)

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens its limit allows."""
        return max(self.request.sampling.max_tokens - len(self.output_token_ids), 0)

    @property
    def num_tokens_here(self) -> int:
        """Tokens that this worker generated."""
        return len(self.output_token_ids) - self.num_tokens_before


class LiveStreams:
    """All live streams, by worker. The code that runs a stream reports when it enters a worker, and when it leaves."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_replica: dict[str, dict[LiveStream, None]] = {}  # in order of arrival

    def enter(
        self,
        request: GenerateRequest,
        output_token_ids: Sequence[int],
        *,
        replica_id: str,
        num_moves: int,
        prompt: Demand | None = None,
        first_due_s: float = math.inf,
        is_handed_over: bool = False,
        goes_on_at: str | None = None,
    ) -> LiveStream:
        """Register a stream that begins or continues at a worker."""
        stream = LiveStream(
            request=request,
            output_token_ids=output_token_ids,
            replica_id=replica_id,
            since_s=self._clock(),
            num_tokens_before=len(output_token_ids),
            num_moves=num_moves,
            prompt=prompt,
            first_due_s=first_due_s,
            is_handed_over=is_handed_over,
            goes_on_at=goes_on_at,
        )
        self._by_replica.setdefault(replica_id, {})[stream] = None
        return stream

    def leave(self, stream: LiveStream) -> None:
        """Unregister a stream that has left its worker, or ended."""
        streams = self._by_replica[stream.replica_id]
        del streams[stream]
        if not streams:
            del self._by_replica[stream.replica_id]

    def all(self) -> list[LiveStream]:
        """Every stream."""
        return [stream for streams in self._by_replica.values() for stream in streams]

    def at(self, replica_id: str) -> list[LiveStream]:
        """The streams at one worker."""
        return list(self._by_replica.get(replica_id, ()))
