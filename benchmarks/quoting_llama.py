"""A Llama that quotes its prompt and edits it as it goes, with the weights and the cost of a random one.

A random model says nothing twice but in loops of its own; callers whose texts repeat (edits of code, summaries that
quote) get answers that say much of the prompt again. Here a token is followed by the one that follows it in a document
of ``DOCUMENT_TOKENS`` tokens, most of the time: what attention and MLP add is made small, so that the last layer sees
the token itself, and its output row says the next. At temperature 1 about one token in 30 is another one, drawn from
the whole vocabulary; each of these leads back to some place of the document. At temperature 2 it is the other way
around: hardly any token is the document's next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from benchmarks.drafted_llama import write_worded_llama
from benchmarks.random_llama import VOCAB_SIZE

DOCUMENT_TOKENS: Final = 128
FIRST_TOKEN: Final = 100
"""The document consists of the tokens from here on, in order; its last token is followed by its first."""

DAMPING: Final = 0.02
LOGIT: Final = 14.5
"""The logit of the next token, where the others have about 0: e^14.5 is 60 times the 32,000 others together at
temperature 1, and a twentieth of them at 2.
"""


def write_quoting_llama(model: Path, dtype: torch.dtype) -> None:
    """Write the 125 M Llama of these benchmarks so that it quotes, with a tokenizer of words."""
    write_worded_llama(model, dtype)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(DAMPING)
    generator = torch.Generator().manual_seed(1)
    words = tensors["model.embed_tokens.weight"]
    hidden_size = words.shape[1]
    places = torch.randn(DOCUMENT_TOKENS, hidden_size, generator=generator)
    noise = 0.2 * torch.randn(VOCAB_SIZE, hidden_size, generator=generator)
    meant = torch.arange(VOCAB_SIZE).sub(FIRST_TOKEN).remainder(DOCUMENT_TOKENS)
    words.copy_(places[meant] + noise)
    # The last norm makes a hidden state as long as the root of its size, whatever its token.
    following = torch.arange(DOCUMENT_TOKENS).add(1).remainder(DOCUMENT_TOKENS) + FIRST_TOKEN
    tensors["lm_head.weight"][following] = (places * (LOGIT / hidden_size)).to(dtype)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def document_from(place: int) -> list[int]:
    """The whole document as a prompt, beginning at one of its tokens; the answer continues at the prompt's end."""
    return [FIRST_TOKEN + (place + offset) % DOCUMENT_TOKENS for offset in range(DOCUMENT_TOKENS)]
