"""How much text one token can stand for: what bounds the number of tokens of a text from below."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

_MAX_NFC_SHRINKAGE = 3
"""The sign for kelvin is 3 bytes, and the K that it becomes is 1; no text shrinks more."""

_LOSSLESS_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence"})


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that become one token.

    Returns:
        None for a tokenizer that may drop text, or put any amount of it into one token: only those that go by bytes,
        and keep all of them, have a bound.
    """
    shrinkage = _shrinkage(backend)
    if shrinkage is None or not _keeps_all_bytes(backend):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    return shrinkage * max(len(token.encode()) for token in backend.get_vocab(with_added_tokens=True))


def _shrinkage(backend: tokenizers.Tokenizer) -> int | None:
    if backend.normalizer is None:
        return 1
    return _MAX_NFC_SHRINKAGE if _described(backend.normalizer)["type"] == "NFC" else None


def _keeps_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    if not isinstance(backend.model, models.BPE) or backend.pre_tokenizer is None:
        return False
    steps = _steps(_described(backend.pre_tokenizer))
    is_lossless = all(
        step["type"] in _LOSSLESS_SPLITTERS or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    goes_by_bytes = any(step["type"] == "ByteLevel" for step in steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return is_lossless and goes_by_bytes and all(backend.token_to_id(byte) is not None for byte in alphabet)


def _described(component: Any) -> dict[str, Any]:
    """The component as tokenizer.json has it; the library shows its fields in no other way."""
    description: dict[str, Any] = json.loads(component.__getstate__())
    return description


def _steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    inner: list[dict[str, Any]] = description.get("pretokenizers", [])
    return [description, *(found for step in inner for found in _steps(step))]
