"""Accuracy on held-out questions by teacher forcing: what greedy decoding would answer, in one forward pass."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from .model import TinyLlama
from .probes import Probe
from .tokenizer import END, PAD, render, token_id

_BATCH_SIZE = 16


@torch.no_grad()
def accuracies(model: TinyLlama, tokenizer: Tokenizer, probes: Sequence[Probe]) -> dict[str, float]:
    """The share of each task's probes whose whole answer, with its end, is the likeliest at every token."""
    outcomes: defaultdict[str, list[bool]] = defaultdict(list)
    pad_id = token_id(tokenizer, PAD)
    for start in range(0, len(probes), _BATCH_SIZE):
        chunk = probes[start : start + _BATCH_SIZE]
        prompts = [tokenizer.encode(render(probe.messages, add_generation_prompt=True)).ids for probe in chunk]
        answers = [tokenizer.encode(f"{probe.answer}{END}").ids for probe in chunk]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, rows))
        token_ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
        hidden = model.hidden_states(token_ids)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            states = hidden[index, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            is_right = model.logits(states).argmax(dim=-1).tolist() == answer
            outcomes[chunk[index].task].append(is_right)
    return {task: sum(values) / len(values) for task, values in outcomes.items()}
