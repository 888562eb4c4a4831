"""Collects everything that an engine returns, by request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.contract.messages import LogprobTable, TokenDelta, TokenLogprobs


@dataclass(slots=True)
class CollectedOutput:
    """One request's tokens, with the log-probabilities of its output and of its prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: LogprobTable | None = None

    def add(self, delta: TokenDelta) -> None:
        """Add a delta. There must be one entry of log-probabilities per token, and those of the prompt only once."""
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is None:
            return
        assert len(delta.logprobs.tokens) in (0, len(delta.token_ids))
        self.logprobs.extend(delta.logprobs.tokens)
        if delta.logprobs.prompt is not None:
            assert self.prompt is None
            self.prompt = delta.logprobs.prompt


def collect(deltas: Iterable[TokenDelta]) -> dict[str, CollectedOutput]:
    """All outputs by request id."""
    outputs: dict[str, CollectedOutput] = {}
    for delta in deltas:
        outputs.setdefault(delta.request_id, CollectedOutput()).add(delta)
    return outputs
