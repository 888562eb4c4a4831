"""The end-of-sequence tokens of a model: one rule for routers, which request them, and engines, whose grammars end with
them. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.contract.checkpoint.json_file import read_json_object_if_there
from engine.contract.errors import CheckpointError


def read_end_tokens(path: Path) -> tuple[int, ...]:
    """The tokens that end a text according to a checkpoint's files, each once.

    They are those of generation_config.json or, where it names none (or null), those of config.json. The tokenizer's
    own is always among them, as in vLLM.

    Raises:
        CheckpointError: A file is unreadable or names something else than tokens.
    """
    named = _named_ids(path / "generation_config.json") or _named_ids(path / "config.json")
    of_tokenizer = _tokenizer_end(path)
    return tuple(dict.fromkeys(named if of_tokenizer is None else (*named, of_tokenizer)))


def _named_ids(file: Path) -> tuple[int, ...]:
    value = read_json_object_if_there(file).get("eos_token_id")
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise CheckpointError(f"{file}: eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(values)


def _tokenizer_end(path: Path) -> int | None:
    config = {
        **read_json_object_if_there(path / "special_tokens_map.json"),
        **read_json_object_if_there(path / "tokenizer_config.json"),
    }
    named = config.get("eos_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    return None if text is None else _token_id(path / "tokenizer.json", text)


def _token_id(file: Path, text: str) -> int | None:
    """The id of the token with this text, if there is one; read from the file, without building a tokenizer."""
    tokenizer = read_json_object_if_there(file)
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == text:
            return int(token["id"])
    vocabulary: Mapping[str, int] | list[list[Any]] = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        return vocabulary.get(text)
    return next((token_id for token_id, (token, _) in enumerate(vocabulary) if token == text), None)
