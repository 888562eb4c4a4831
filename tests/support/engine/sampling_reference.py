"""The correct result of a request, computed with transformers and plain Python: token by token, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.contract.messages import SamplingParams
from tests.support.engine.checkpoints import oracle_logits

NEVER = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Greedy tokens and the log-softmax [num_tokens, vocab_size] at each, for the output and for prompt[1:]."""

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    prompt_logprobs: torch.Tensor


def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], sampling: SamplingParams) -> Reference:
    """The tokens of a greedy request that ends by length."""
    output: list[int] = []
    logprobs: list[torch.Tensor] = []
    logits = oracle_logits(model, list(prompt))
    prompt_logprobs = torch.log_softmax(logits.double(), dim=1)[:-1]
    for _ in range(sampling.max_tokens):
        last = oracle_logits(model, [*prompt, *output])[-1].double()
        logprobs.append(torch.log_softmax(last, dim=0))
        output.append(int(changed(last, sampling, prompt, output).argmax()))
    return Reference(token_ids=tuple(output), logprobs=torch.stack(logprobs), prompt_logprobs=prompt_logprobs)


def changed(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """One position's logits after bias, penalties and masks, by their definitions."""
    values = logits.tolist()
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in {*prompt, *output}:
        scale = sampling.repetition_penalty
        values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
    for token in set(output):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(output).count(token)
    values = without_repeated_ngrams(values, (*prompt, *output), sampling.no_repeat_ngram_size)
    for word in sampling.bad_words:
        if len(word) == 1 or tuple(output[-len(word) + 1 :]) == word[:-1]:
            values[word[-1]] = NEVER
    if len(output) < sampling.min_tokens:
        eos = () if sampling.ignore_eos else sampling.eos_token_ids
        for token in (*eos, *sampling.stop_token_ids):
            values[token] = NEVER
    if sampling.allowed_token_ids is not None:
        values = [value if token in sampling.allowed_token_ids else -float("inf") for token, value in enumerate(values)]
    return torch.tensor(values, dtype=torch.float64)


def without_repeated_ngrams(values: Sequence[float], tokens: tuple[int, ...], size: int) -> list[float]:
    """The logits of what follows ``tokens``, without what would repeat a sequence of ``size`` tokens."""
    said = {tokens[start : start + size] for start in range(len(tokens) - size + 1)} if size else set()
    ends = tokens[len(tokens) + 1 - size :] if size else ()
    return [NEVER if (*ends, token) in said else value for token, value in enumerate(values)]
