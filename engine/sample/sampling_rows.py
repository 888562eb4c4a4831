"""The sampling parameters of all running requests, as arrays that the sampler indexes by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.messages import SamplingParams
from engine.sample.logit_rules import LogitRuleRows
from engine.step import BoolArray, IntArray

FloatArray = npt.NDArray[np.float32]

SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF


class SamplingRows:
    """One entry a row; the meaning of each array is that of the field of ``SamplingParams``.

    ``is_plain`` rows take the most likely token of the untouched logits: nothing else of them is looked at, except
    while a plain row has fewer than ``min_tokens`` output tokens. ``num_logprobs`` is -1 where none are wanted. What is
    drawn for ``reads_history`` rows depends on the tokens that they hold. ``is_bare`` rows are plain ones that want
    nothing but the token, however short they are.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p: FloatArray = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.min_p: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)
        self.presence_penalty: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency_penalty: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition_penalty: FloatArray = np.ones(max_num_seqs, dtype=np.float32)
        self.min_length: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_logprobs: IntArray = np.full(max_num_seqs, -1, dtype=np.int32)
        self.rules = LogitRuleRows(max_num_seqs)
        self.has_penalties: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.reads_history: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.is_plain: BoolArray = np.ones(max_num_seqs, dtype=np.bool_)
        self.is_bare: BoolArray = np.ones(max_num_seqs, dtype=np.bool_)
        self.ending_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> None:
        """Store a request's parameters."""
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed & SEED_MASK
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.min_length[row] = num_prompt_tokens + sampling.min_tokens
        self.has_penalties[row] = sampling.has_penalties
        self.num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.rules.set(row, sampling.rules)
        has_phrases = sampling.rules is not None and any(len(word) > 1 for word in sampling.rules.bad_words)
        self.reads_history[row] = sampling.has_penalties or has_phrases
        self.is_plain[row] = sampling.is_greedy and not sampling.has_penalties and sampling.rules is None
        self.is_bare[row] = self.is_plain[row] and sampling.num_logprobs is None and not sampling.min_tokens
        eos_token_ids = () if sampling.ignore_eos else sampling.eos_token_ids
        self.ending_token_ids[row] = tuple({*eos_token_ids, *sampling.stop_token_ids})
