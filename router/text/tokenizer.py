"""Text to token ids and back, from the tokenizer files of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from router.errors import ModelDirectoryError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_MAX_NFC_SHRINKAGE = 3
"""The most that normalization shrinks a text: the kelvin sign has 3 bytes, and the K that it becomes has 1."""

_LOSSLESS_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence"})


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty when there is no such file.

    Raises:
        ModelDirectoryError: The file is there and is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"cannot read {path}: it holds a {type(content).__name__}, not an object")
    return content


def _token_text(value: object) -> str | None:
    """A special token is written as a string, or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The named special tokens, as text, for chat templates."""

    named: Mapping[str, str]


class Tokenizer:
    """A model's tokenizer. Stateless between calls, and safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, *, config: Mapping[str, object] | None = None) -> None:
        config = config or {}
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.special = SpecialTokens(named=_named_tokens(config))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._added_ids = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._max_bytes_per_token = max_bytes_per_token(backend)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and special_tokens_map.json.

        Raises:
            ModelDirectoryError: There is no usable tokenizer.json.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelDirectoryError(f"{model_dir} has no tokenizer.json, which is needed to turn text into tokens")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            raise ModelDirectoryError(f"cannot read {path}: {error}") from error
        config = {**read_json(model_dir / "special_tokens_map.json"), **read_json(model_dir / "tokenizer_config.json")}
        return cls(backend, config=config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens are added as tokenizer.json says, but never to rendered chats. As in
        transformers, ``add_bos_token`` of tokenizer_config.json is ignored when there is a tokenizer.json.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, computed without the GIL: call it in a thread if the texts are long.

        The library's ``encode`` holds the GIL (measured: 12 s for 7 MB), its batches do not (0.01 s of 2.8 s).
        """
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def min_num_tokens(self, text: str) -> int:
        """A lower bound on a text's tokens, without tokenizing it; 0 if there is no bound."""
        if self._max_bytes_per_token is None:
            return 0
        return -(-len(text.encode()) // self._max_bytes_per_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of tokens."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """How the vocabulary spells tokens; None for ids that it does not have."""
        return [self.backend.id_to_token(token_id) for token_id in token_ids]

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token, special or not, that has this text; such text always becomes that one token."""
        return self._added_ids.get(text)

    def token_id(self, token: str) -> int | None:
        """The id of a token's text, if there is such a token."""
        found: int | None = self.backend.token_to_id(token)
        return found


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    named = {name: _token_text(config.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in named.items() if text is not None}


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The largest number of a text's bytes that become one token.

    Returns:
        None for a tokenizer that may drop text, or put any amount of it into one token. Only byte-based tokenizers that
        keep all bytes have a bound.
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
    """The component as tokenizer.json describes it; the library exposes its fields in no other way."""
    description: dict[str, Any] = json.loads(component.__getstate__())
    return description


def _steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    inner: list[dict[str, Any]] = description.get("pretokenizers", [])
    return [description, *(found for step in inner for found in _steps(step))]
