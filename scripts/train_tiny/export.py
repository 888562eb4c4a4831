"""Write a trained model as a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .model import ModelConfig, TinyLlama
from .tokenizer import BEGIN, CHAT_TEMPLATE, END, PAD, load_tokenizer, token_id

WEIGHTS_NAME = "model.safetensors"


def export(checkpoint: Path, tokenizer_directory: Path, model_directory: Path) -> None:
    """Write weights in bfloat16, configuration, tokenizer and chat template to ``model_directory``."""
    config = ModelConfig()
    model = TinyLlama(config)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    tokenizer = load_tokenizer(tokenizer_directory)
    ids = {token: token_id(tokenizer, token) for token in (BEGIN, END, PAD)}
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}

    model_directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, model_directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (model_directory / WEIGHTS_NAME).chmod(0o644)
    tokenizer.save(str(model_directory / "tokenizer.json"))
    _write(model_directory / "config.json", _config(config, ids))
    _write(model_directory / "generation_config.json", _generation_config(ids))
    _write(model_directory / "tokenizer_config.json", _tokenizer_config(config))
    _write(model_directory / "special_tokens_map.json", _special_tokens())


def _config(config: ModelConfig, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.to_dict(),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "baton_cpu_dtype": "float32",
        "use_cache": True,
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }


def _generation_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": ids[BEGIN],
        "eos_token_id": [ids[END]],
        "pad_token_id": ids[PAD],
        "do_sample": False,
    }


def _special_tokens() -> dict[str, str]:
    return {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}


def _tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(),
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
