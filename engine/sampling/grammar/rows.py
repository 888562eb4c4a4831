"""Which rows follow a grammar: tokens that violate it cannot be drawn."""

from __future__ import annotations

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import IntArray
from engine.device.copies import upload
from engine.sampling.grammar.compiler import GrammarStore
from engine.sampling.grammar.masks import BatchMasks, GrammarMasks
from engine.sampling.token_history import TokenHistory


class GrammarRows:
    """Which rows have grammars, and the masks of a batch. Masks are applied last, so that nothing can undo them.

    A grammar takes precedence over ``min_tokens``, ``ignore_eos`` and bad words: if these leave no token that fits,
    they are ignored, and an output whose grammar is complete ends. The output also ends if no allowed token fits and
    the grammar may end there.
    """

    def __init__(self, max_num_seqs: int, store: GrammarStore | None) -> None:
        self._is_concerned = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_concerned = 0
        self._masks = GrammarMasks(store) if store is not None else None

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Store the grammar of the new request in a row, in place of the last request's."""
        has_grammar = sampling.grammar is not None
        if has_grammar:
            assert self._masks is not None, "a request has a grammar, and nothing here compiles any"
            self._masks.set(row, sampling)
        elif self._is_concerned[row] and self._masks is not None:
            self._masks.forget(row)
        self._num_concerned += has_grammar - int(self._is_concerned[row])
        self._is_concerned[row] = has_grammar

    def begin(self, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """Start to fill the masks of a batch; all its tokens before these positions are known."""
        if not self._num_concerned:
            return
        concerned = np.flatnonzero(self._is_concerned[rows])
        if concerned.size and self._masks is not None:
            self._masks.begin(rows[concerned], positions[concerned], history)

    def take(self, rows: IntArray, positions: IntArray, history: TokenHistory) -> BatchMasks | None:
        """The masks of a batch; None if no row has a grammar."""
        if not self._num_concerned:
            return None
        concerned = np.flatnonzero(self._is_concerned[rows])
        if not concerned.size or self._masks is None:
            return None
        return self._masks.take(concerned, rows, positions, history)


def forbid(logits: torch.Tensor, masks: BatchMasks) -> None:
    """Set the logits of tokens that the rows' masks forbid to minus infinity, in place.

    logits: [num_rows, vocab_size] float32, for the same entries as ``masks``.
    """
    vocab_size = logits.shape[1]
    entries = np.flatnonzero(masks.places >= 0)
    if not entries.size:
        return
    for entry, token_ids in masks.endings:
        logits[entry, [token_id for token_id in token_ids if token_id < vocab_size]] = 0.0
    forbidden = _forbidden(masks.words[masks.places[entries]], vocab_size, logits.device)
    if len(entries) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    index = upload(entries, logits.device)
    logits[index] = logits.index_select(0, index).masked_fill_(forbidden, -torch.inf)


def _forbidden(words: IntArray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[num_masks, vocab_size] True for forbidden tokens; unpacked on the device of the logits."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits ^ 1).view(torch.bool)
    on_device = upload(words, device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    allowed = (on_device[:, :, None] >> shifts) & 1
    return allowed.flatten(1)[:, :vocab_size] == 0
