"""The random Llama that runs on GPUs: how much its steps read and multiply, and its files, written without
transformers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.builtin import builtin_model_dir
from engine.model.weights.shards import INDEX_FILE

WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """A Llama with an output head that is not tied to the embedding."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int

    @property
    def layer_parameters(self) -> int:
        """Number of weights in one layer's matrices."""
        projections = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden_size * (projections + 3 * self.intermediate_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, in 16 bits."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    def step_bytes(self, *, batch: int, context: float) -> float:
        """Bytes that a decode step has to read: every matrix once, and the keys and values of ``batch`` rows."""
        matrices = 2 * (self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size)
        return matrices + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, num_tokens: int) -> float:
        """Operations that a prompt takes: the layers' matrices for each token, the head for the last one, and the
        scores and weighted sums of causal attention, half of a square each.
        """
        matrices = 2 * num_tokens * self.num_layers * self.layer_parameters
        attention = 2 * num_tokens**2 * self.num_heads * self.head_dim * self.num_layers
        return matrices + attention + 2 * self.vocab_size * self.hidden_size


SHAPES = {
    "8B": LlamaShape(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_model_len=16_384,
    ),
    "tiny": LlamaShape(
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=320,
        max_model_len=512,
    ),
}


@contextmanager
def llama_directory(shape: LlamaShape, device: torch.device, *, kept: Path | None) -> Iterator[Path]:
    """The model's directory: ``kept``, to which it is written if it is missing, or a temporary one."""
    if kept is None:
        with tempfile.TemporaryDirectory() as folder:
            write_llama(Path(folder), shape, device)
            yield Path(folder)
        return
    if not (kept / INDEX_FILE).exists():
        kept.mkdir(parents=True, exist_ok=True)
        write_llama(kept, shape, device)
    yield kept


def write_llama(directory: Path, shape: LlamaShape, device: torch.device) -> None:
    """Write a Hugging Face directory, a file for each layer. All layers have the same weights: drawing 8 B takes time,
    and how long a product takes depends on what kind of numbers it multiplies, not on which. Any tokenizer will do:
    prompts and answers are token ids.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "model_type": "llama",
    }
    (directory / "config.json").write_text(json.dumps(config))
    files: dict[str, str] = {}
    layer = _layer(shape, device)
    for index in range(shape.num_layers):
        tensors = {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
        _write(directory / f"layer-{index:03}.safetensors", tensors, files)
    rest = {
        "model.embed_tokens.weight": _random(shape.vocab_size, shape.hidden_size, device=device) / WEIGHT_STD,
        "lm_head.weight": _random(shape.vocab_size, shape.hidden_size, device=device),
        "model.norm.weight": torch.ones(shape.hidden_size, dtype=torch.bfloat16),
    }
    _write(directory / "rest.safetensors", rest, files)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model_dir() / name, directory)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _write(file: Path, tensors: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
    files.update(dict.fromkeys(tensors, file.name))


def _layer(shape: LlamaShape, device: torch.device) -> dict[str, torch.Tensor]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{name}.weight": _random(*size, device=device).cpu() for name, size in sizes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}


def _random(rows: int, columns: int, *, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rows * columns)
    numbers = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
    return numbers.mul_(WEIGHT_STD)
