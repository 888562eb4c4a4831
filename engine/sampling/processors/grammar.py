"""Grammars: every token that would leave the grammar is impossible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.contract.grammar import RowFailure
from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import upload
from engine.sampling.grammar.compiler import GrammarStore
from engine.sampling.grammar.masks import BatchMasks, GrammarMasks
from engine.sampling.processors.processor import FOREVER, NEVER
from engine.sampling.token_history import TokenHistory


class GrammarProcessor:
    """Sets the logits of what does not fit a row's grammar to minus infinity. Comes last: nothing may undo it.

    It holds before ``min_tokens``, ``ignore_eos`` and bad words: where these leave nothing that fits, they give way,
    and an output whose grammar is complete ends. So it does where no allowed token fits, if it may end there.
    """

    def __init__(self, max_num_seqs: int, store: GrammarStore | None) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._masks = GrammarMasks(store) if store is not None else None
        self._failures: Sequence[RowFailure] = ()

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        if sampling.grammar is None:
            if self._is_concerned[row] and self._masks is not None:
                self._masks.forget(row)
            self._is_concerned[row] = False
            return NEVER
        assert self._masks is not None, "a request has a grammar, and nothing here compiles any"
        self._masks.set(row, sampling)
        self._is_concerned[row] = True
        return FOREVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return bool(self._is_concerned[row])

    def begin(self, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """Begin to fill the masks of a batch whose tokens before these positions are all known."""
        concerned = np.flatnonzero(self._is_concerned[rows])
        if concerned.size and self._masks is not None:
            self._masks.begin(rows[concerned], positions[concerned], history)

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        concerned = np.flatnonzero(self._is_concerned[rows])
        if concerned.size and self._masks is not None:
            masks = self._masks.take(concerned, rows[concerned], positions[concerned], history)
            self._failures = masks.failures
            _apply(logits, masks)

    def take_failures(self) -> Sequence[RowFailure]:
        """The rows of the last batch that cannot go on; once."""
        failures, self._failures = self._failures, ()
        return failures


def _apply(logits: torch.Tensor, masks: BatchMasks) -> None:
    vocab_size = logits.shape[1]
    for place, token_ids in masks.endings:
        inside = [token_id for token_id in token_ids if token_id < vocab_size]
        logits[int(masks.entries[place]), inside] = 0.0
    forbidden = _forbidden(masks.words, vocab_size, logits.device)
    if len(masks.entries) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    index = upload(masks.entries, logits.device)
    logits[index] = logits.index_select(0, index).masked_fill_(forbidden, -torch.inf)


def _forbidden(words: IntArray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[num_masks, vocab_size] True for the tokens that masks do not allow; unpacked where the logits are."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits ^ 1).view(torch.bool)
    on_device = upload(words, device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    allowed = (on_device[:, :, None] >> shifts) & 1
    return allowed.flatten(1)[:, :vocab_size] == 0
