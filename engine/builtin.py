"""The model that is served when none is named."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

SHIPPED_DIR = Path(__file__).parent / "builtin_model"
CACHE_NAME = "random-llama-1"

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, CONTEXT = 64, 4, 4, 2, 16, 176, 260, 2048
SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def builtin_model_dir() -> Path:
    """A directory with a small model: the shipped one, or one of random weights made on first use."""
    if (SHIPPED_DIR / "config.json").is_file():
        return SHIPPED_DIR
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    target = cache / CACHE_NAME
    if not (target / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=CACHE_NAME, dir=cache))
        write_random_llama(made)
        # Two processes may make it at the same time: the files are the same, and renaming one by one is atomic.
        target.mkdir(exist_ok=True)
        for file in sorted(made.iterdir(), key=lambda entry: entry.name == "config.json"):
            file.replace(target / file.name)
        made.rmdir()
    return target


def write_random_llama(folder: Path) -> None:
    """Write a checkpoint of deterministic random weights with a byte-level tokenizer and a chat template."""
    save_file(random_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    end = VOCAB - 1
    contents: dict[str, dict[str, Any]] = {
        "tokenizer.json": byte_tokenizer(),
        "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE, "eos_token": SPECIAL_TOKENS[-1]},
        "generation_config.json": {"eos_token_id": end},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": MLP,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "eos_token_id": end,
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def random_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the model, wide enough that the most likely tokens are apart."""
    random = np.random.default_rng(20261121)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.normal(0.0, 1.5 / columns**0.5, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": random.normal(0.0, 1.0, (VOCAB, HIDDEN)).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = np.ones(HIDDEN, dtype=np.float32)
        weights[prefix + "post_attention_layernorm.weight"] = np.ones(HIDDEN, dtype=np.float32)
        weights[prefix + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(MLP, HIDDEN)
        weights[prefix + "mlp.up_proj.weight"] = matrix(MLP, HIDDEN)
        weights[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
    return weights


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are the 256 bytes, in GPT-2's printable spelling, and the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    special = [
        {
            "id": 256 + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelling[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
