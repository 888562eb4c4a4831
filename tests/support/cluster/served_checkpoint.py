"""A random checkpoint with everything that a cluster needs: weights, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.engine.checkpoints import make_checkpoint

SPECIAL_TOKENS = ("<|unknown|>", "<|begin|>", "<|end|>")
"""Their ids are 0, 1 and 2, as the random checkpoints declare."""

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}: <tool_call>]{% endfor %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_served_checkpoint(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Write a checkpoint that `baton serve` takes."""
    make_checkpoint(path, architecture, **changes)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "bos_token": SPECIAL_TOKENS[1], "eos_token": SPECIAL_TOKENS[2]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are the special ones and the 256 bytes."""
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    return tokenizer
