"""One beam search: which candidates go on, which outputs are complete, and when no better one can come. Free of torch.

Outputs and scores are those of transformers' ``generate(num_beams=...)``, in the same float32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.messages import BeamParams, BeamResult

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


LOWEST_SCORE: Final = float(np.finfo(np.float32).min)
"""The score of outputs whose score overflows. JSON has no infinity."""


class Beam(NamedTuple):
    """A running output, with the sum of its tokens' log-probabilities."""

    token_ids: tuple[int, ...]
    logprob: np.float32


class BeamSearch:
    """The state of one search; it does not know where its beams are computed.

    ``running`` are the outputs that go on, best first, all of the same length; ``finished`` the complete ones, best
    first. A token in ``stop_ids`` completes an output that has at least ``min_tokens`` tokens; ``max_tokens`` tokens
    complete it in any case.

    Source: transformers, ``GenerationMixin._beam_search`` (5.24).
    """

    def __init__(self, params: BeamParams, *, stop_ids: frozenset[int], min_tokens: int, max_tokens: int) -> None:
        self.params = params
        self.running: tuple[Beam, ...] = (Beam((), np.float32(0.0)),)
        self.finished: tuple[BeamResult, ...] = ()
        self.is_over = False
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self.num_candidates = params.num_candidates(len(stop_ids))

    @property
    def num_tokens(self) -> int:
        """Tokens of every running output."""
        return len(self.running[0].token_ids)

    @property
    def results(self) -> tuple[BeamResult, ...]:
        """The outputs that were asked for, once the search is over."""
        return self.finished[: self.params.num_results]

    def advance(self, token_ids: Sequence[IntArray], logprobs: Sequence[FloatArray]) -> list[int]:
        """Extend every running output by one token.

        token_ids, logprobs: the candidates of each running output, best first.

        Returns:
            For each of the new ``running``, the index of the previous running output that it continues.
        """
        width, length = self.params.width, self.num_tokens + 1
        scores = np.concatenate([values + beam.logprob for values, beam in zip(logprobs, self.running, strict=True)])
        tokens = np.concatenate(token_ids)
        owners = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
        goes_on: list[int] = []
        complete: list[BeamResult] = []
        for place, candidate in enumerate(np.argsort(-scores, kind="stable").tolist()):
            if place >= width and (len(goes_on) >= width or length >= self._max_tokens):
                break
            token, before = int(tokens[candidate]), self.running[owners[candidate]]
            is_stop = token in self._stop_ids and length >= self._min_tokens
            if not is_stop and length < self._max_tokens:
                goes_on.append(candidate)
            elif place < width:
                complete.append(self._complete((*before.token_ids, token), is_stop, scores[candidate]))
        # Sorting is stable: of equal outputs the earlier one stays.
        self.finished = tuple(sorted((*self.finished, *complete), key=lambda found: -found.score)[:width])
        chosen = goes_on[:width]
        parents = [int(owners[candidate]) for candidate in chosen]
        self.running = tuple(
            Beam((*self.running[parent].token_ids, int(tokens[candidate])), np.float32(scores[candidate]))
            for parent, candidate in zip(parents, chosen, strict=True)
        )
        self.is_over = not self.running or not self._can_improve(length)
        return parents

    def _complete(self, token_ids: tuple[int, ...], is_stop: bool, logprob: np.float32) -> BeamResult:
        return BeamResult(
            token_ids=token_ids,
            stop_token_id=token_ids[-1] if is_stop else None,
            cumulative_logprob=float(logprob),
            score=self._score(logprob, len(token_ids)),
        )

    def _score(self, logprob: np.float32, length: int) -> float:
        with np.errstate(over="ignore"):
            score = np.float32(logprob) / np.float32(float(length) ** self.params.length_penalty)
        return max(float(score), LOWEST_SCORE)

    def _can_improve(self, length: int) -> bool:
        """True while a running output may still beat the worst complete one, or complete ones are still missing."""
        params = self.params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = self._max_tokens
        return self._score(self.running[0].logprob, length) > self.finished[-1].score
