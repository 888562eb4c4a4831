"""A model directory with tokenizer files only: tiny byte-level BPE, trained on a few sentences in memory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

EOS = "<|end|>"
BOS = "<|begin|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
_SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a baton is handed from one runner to the next runner",
    "[system] [user] [assistant] hello world, how are you today?",
] * 4


def byte_level_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer with all 256 bytes, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    if adds_bos:
        bos_id = tokenizer.token_to_id(BOS)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    return tokenizer


def write_model_dir(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    config: dict[str, object] | None = None,
    generation_config: dict[str, object] | None = None,
) -> Path:
    """Write the files of a model directory that the router reads."""
    tokenizer = tokenizer or byte_level_tokenizer()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE, **(config or {})}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(EOS)}))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path
