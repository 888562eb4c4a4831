"""Beam search between the API and the engine: what is asked for, what steps tell of it, and what is found.

Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

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


class BeamCandidates(NamedTuple):
    """The most likely next tokens of the rows that are beams, best first.

    rows: [num_rows]; token_ids, logprobs: [num_rows, num_candidates], logarithms of the model's probabilities after
    penalties and rules. There are as many columns as some row wants.
    """

    rows: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class BeamResult(NamedTuple):
    """An output that a beam search found. ``stop_token_id`` is the token that ended it; None where it is too long.

    ``cumulative_logprob`` is the sum of its tokens' log-probabilities, ``score`` what it was ranked by.
    """

    token_ids: tuple[int, ...]
    stop_token_id: int | None
    cumulative_logprob: float
    score: float
