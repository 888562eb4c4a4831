"""The sampling parameters of all running requests, as arrays that the sampler indexes by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.contract.messages import SamplingParams
from engine.contract.step import BoolArray, IntArray
from engine.sampling.grammar.compiler import GrammarStore
from engine.sampling.grammar.rows import GrammarRows
from engine.sampling.processors.registry import PROCESSORS, ProcessorFactory

FloatArray = npt.NDArray[np.float32]

SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF


class SamplingRows:
    """One entry a row. Most arrays have the meaning of the ``SamplingParams`` field of the same name.

    num_logprobs: -1 if none are wanted. num_candidates: 0 for rows that are not beams.
    changed_until: before this position some processor may change the row's logits; grammars do not count, since they
        only restrict which logits count.
    reads_history: the row's draw depends on the tokens that it holds.
    grammars: the store of compiled grammars, if requests may have any.
    is_argmax_only: the row wants the most likely token of its unchanged logits at every position, and nothing else.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        grammars: GrammarStore | None = None,
        processors: Sequence[ProcessorFactory] = PROCESSORS,
    ) -> None:
        self.grammar = GrammarRows(max_num_seqs, grammars)
        self.processors = tuple(build(max_num_seqs) for build in processors)
        self.temperature: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p: FloatArray = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.min_p: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)
        self.num_logprobs: IntArray = np.full(max_num_seqs, -1, dtype=np.int32)
        self.num_candidates: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.is_greedy: BoolArray = np.ones(max_num_seqs, dtype=np.bool_)
        self.changed_until: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.reads_history: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.is_argmax_only: BoolArray = np.ones(max_num_seqs, dtype=np.bool_)
        self._last_set: list[tuple[SamplingParams, int] | None] = [None] * max_num_seqs

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> None:
        """Store a request's parameters. A row that has them already keeps them: beams are set anew in each step."""
        last, self._last_set[row] = self._last_set[row], (sampling, num_prompt_tokens)
        if last is not None and last[0] is sampling and last[1] == num_prompt_tokens and sampling.grammar is None:
            return
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed & SEED_MASK
        self.num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.num_candidates[row] = _num_candidates(sampling)
        self.is_greedy[row] = sampling.is_greedy
        changed_until = max(
            processor.set(row, sampling, num_prompt_tokens=num_prompt_tokens) for processor in self.processors
        )
        self.changed_until[row] = changed_until
        self.grammar.set(row, sampling)
        has_grammar = sampling.grammar is not None
        self.reads_history[row] = has_grammar or any(processor.reads_history(row) for processor in self.processors)
        shows_more = has_grammar or sampling.num_logprobs is not None or sampling.beams is not None
        self.is_argmax_only[row] = sampling.is_greedy and not changed_until and not shows_more


def _num_candidates(sampling: SamplingParams) -> int:
    """How many candidate tokens a step reports for a beam; 0 if the row is not a beam."""
    if sampling.beams is None:
        return 0
    return sampling.beams.num_candidates(len(sampling.all_stop_ids))
