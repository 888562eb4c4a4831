"""The tokens that the running requests hold, as the sampler reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.contract.step import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The tokens of all rows: token_ids [max_num_seqs, width]; those before num_prompt_tokens[row] are the prompt."""

    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: IntArray
