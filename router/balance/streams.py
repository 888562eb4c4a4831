"""The streams of this router that workers generate now, each at its worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.contract.messages import GenerateRequest
from router.pool.demand import Demand


class MoveReason(StrEnum):
    """Why a stream is moved: its worker would keep it waiting between tokens, has hardly any KV blocks left, is behind
    with the prompts that wait there, or an operator wants it."""

    GAP = "gap"
    KV = "kv"
    QUEUE = "queue"
    ORDER = "order"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """A stream was told to leave its worker. ``target`` is where it should go on; None leaves that to the policy."""

    target: str | None
    reason: MoveReason
    ordered_at_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class LiveStream:
    """One stream for as long as one worker generates it. ``output_token_ids`` are all its tokens so far, and grow.

    ``num_moves``: how often it was told to leave a worker before, and did.
    ``order`` stands from the time on when it was told to leave this one.
    ``prompt`` is what the worker has to compute before the first token; None: that is computed elsewhere, was, or has
    begun. Its first token was promised until ``first_due_s``, if at all.
    ``is_handed_over``: only its prompt is computed here, and ``goes_on_at`` is where it is generated, if it is known.
    """

    request: GenerateRequest
    output_token_ids: Sequence[int]
    replica_id: str
    since_s: float
    num_tokens_before: int
    num_moves: int = 0
    order: MoveOrder | None = None
    prompt: Demand | None = None
    first_due_s: float = math.inf
    is_handed_over: bool = False
    goes_on_at: str | None = None

    @property
    def num_context_tokens(self) -> int:
        """Prompt and output so far: what each of its steps reads, and a move copies."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_waiting(self) -> bool:
        """True for a prompt that has no token yet, and was not told to leave. Beams come all at the end."""
        is_open = self.prompt is not None and self.order is None and not self.output_token_ids
        return is_open and self.request.sampling.beams is None

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still come, by its limit."""
        return max(self.request.sampling.max_tokens - len(self.output_token_ids), 0)

    @property
    def num_tokens_here(self) -> int:
        """Tokens that came from this worker."""
        return len(self.output_token_ids) - self.num_tokens_before


class LiveStreams:
    """All of them by worker. Whoever runs a stream says when it begins at a worker, and when it leaves."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_replica: dict[str, dict[LiveStream, None]] = {}  # in the order in which they came

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
        """A stream begins at a worker, or goes on there."""
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
        """It has left its worker, or ended."""
        streams = self._by_replica[stream.replica_id]
        del streams[stream]
        if not streams:
            del self._by_replica[stream.replica_id]

    def all(self) -> list[LiveStream]:
        """Every stream."""
        return [stream for streams in self._by_replica.values() for stream in streams]

    def at(self, replica_id: str) -> list[LiveStream]:
        """Those at one worker."""
        return list(self._by_replica.get(replica_id, ()))
