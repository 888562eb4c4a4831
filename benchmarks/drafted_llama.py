"""A random Llama and a smaller one that often predicts the same tokens, as Hugging Face directories with a tokenizer of
words.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.random_llama import VOCAB_SIZE, write_random_llama

NUM_DRAFT_LAYERS: Final = 2

DAMPING: Final = 0.03
"""What the other layers add is made so small: without it two random models agree on nothing. Of greedy drafts some 7 in
10 are right then; times are those of any numbers."""

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_worded_llama(model: Path, dtype: torch.dtype) -> None:
    """Write the 125 M Llama with a tokenizer that encodes its decoded texts to the same tokens."""
    model.mkdir()
    write_random_llama(model, dtype)
    _name_words(model)


def write_draft_model(model: Path, draft_model: Path) -> None:
    """Reduce the effect of all layers after the first two of a model, and write a second model of only these two."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if _layer_of(name) >= NUM_DRAFT_LAYERS and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(DAMPING)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(model, draft_model)
    config = json.loads((model / "config.json").read_text())
    (draft_model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_DRAFT_LAYERS}))
    kept = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < NUM_DRAFT_LAYERS}
    save_file(kept, draft_model / "model.safetensors", metadata={"format": "pt"})


def _layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 if it belongs to none."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def _name_words(directory: Path) -> None:
    """Give every token its own word, so that encoding a decoded text gives the same tokens."""
    words = models.WordLevel({f"w{token_id}": token_id for token_id in range(VOCAB_SIZE)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _CHAT_TEMPLATE}))
