"""What a set of workers has to do and how fast it is, by its reports: what a size is predicted from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.promise import Promise
from engine.contract.step_time import StepTimeModel
from router.placement.prompt_share import num_prompt_tokens
from router.pool.replica import KNOWN_PROMPT_TOKENS, Replica
from router.scaling.prediction import Predictor

MIN_STREAM_TOKENS = 64
"""A worker that generated fewer says nothing of streams."""

_PROMPT_PRICES = ("prompt_token_s", "prompt_read_s")
_STREAM_PRICES = ("base_s", "row_s", "context_token_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The workers of one pool, or of all where any worker takes any work."""

    replicas: Sequence[Replica]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait, or are on their way."""
        return sum(replica.queued_tokens for replica in self.replicas)

    @property
    def num_streams(self) -> int:
        """Streams that are generated, or are about to."""
        return sum(
            replica.load.num_decoding + replica.load.num_loading + replica.num_reserved_rows
            for replica in self.replicas
        )

    def predictor(self, promise: Promise, *, prompts: bool, streams: bool) -> Predictor | None:
        """What predicts for workers like these; None until enough is known of the work that they are to do."""
        models = [replica for replica in self.replicas if replica.load.step_time.num_steps > 0]
        with_prompts = [item for item in models if num_prompt_tokens(item.load) >= KNOWN_PROMPT_TOKENS]
        with_streams = [
            item for item in models if item.load.counters.get("num_generated_tokens", 0.0) >= MIN_STREAM_TOKENS
        ]
        if (prompts and not with_prompts) or (streams and not with_streams):
            return None
        prices = {name: _mean(with_prompts or models, name) for name in _PROMPT_PRICES}
        prices |= {name: _mean(with_streams or models, name) for name in _STREAM_PRICES}
        tokens = [item.load.num_blocks * item.info.block_size for item in models if item.info is not None]
        return Predictor(
            step_time=StepTimeModel(**prices, error=0.0, num_steps=1),
            promise=promise,
            num_kv_tokens=min(tokens, default=0),
        )


def _mean(replicas: Sequence[Replica], name: str) -> float:
    values = [getattr(replica.load.step_time, name) for replica in replicas]
    return sum(values) / len(values) if values else 0.0
