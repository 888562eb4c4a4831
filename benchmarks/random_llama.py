"""The random models that the engine benchmarks run, as Hugging Face directories: a 125 M Llama, and others of the same
sizes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers

from engine.model.builtin import builtin_model_dir

VOCAB_SIZE = 32_000


_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def write_random_llama(directory: Path, dtype: torch.dtype) -> None:
    """Write 12 layers, hidden 768, 12 heads of 64 with 4 KV heads, MLP 2,048, vocabulary 32,000, untied."""
    _write(transformers.LlamaForCausalLM, transformers.LlamaConfig(**_SHAPE), directory, dtype)


def write_small_llama(directory: Path, dtype: torch.dtype) -> None:
    """Write a Llama of the same vocabulary that takes next to no time: 2 layers, hidden 64, 2 heads, MLP 128."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**{**_SHAPE, **sizes, "num_key_value_heads": 1, "head_dim": 32})
    _write(transformers.LlamaForCausalLM, config, directory, dtype)


def write_random_mixture(directory: Path, dtype: torch.dtype) -> None:
    """The same with 8 experts instead of the MLP, of which each token uses 2: 520 M parameters."""
    config = transformers.MixtralConfig(**_SHAPE, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    _write(transformers.MixtralForCausalLM, config, directory, dtype)


def write_random_gemma3(directory: Path, dtype: torch.dtype) -> None:
    """A Gemma 3 of the same sizes, and so with as many FLOPs per token: five in six layers see 512 tokens."""
    config = transformers.Gemma3TextConfig(**_SHAPE, query_pre_attn_scalar=_SHAPE["head_dim"], sliding_window=512)
    _write(transformers.Gemma3ForCausalLM, config, directory, dtype)


def _write(
    model_class: type[transformers.PreTrainedModel],
    config: transformers.PreTrainedConfig,
    directory: Path,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = model_class(config).to(dtype)
    model.save_pretrained(directory)
    # A tokenizer, so that it can be served: any will do, prompts and answers are token ids.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model_dir() / name, directory)


def name_all_tokens(directory: Path) -> None:
    """Give every token id of the model a text, for benchmarks that measure the text of answers."""
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    named = set(vocabulary.values())
    vocabulary.update({f"Ġword{token_id}": token_id for token_id in range(VOCAB_SIZE) if token_id not in named})
    file.write_text(json.dumps(tokenizer))
