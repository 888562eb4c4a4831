"""How single tokens are written on their own, for example in log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.text.tokenizer import Tokenizer


class Spelling(NamedTuple):
    """A token's text, in which bytes that form no whole character are U+FFFD; ``data`` are its actual bytes.

    ``data`` is None if the tokenizer has no bytes for single tokens.
    """

    text: str
    data: bytes | None

    @property
    def is_whole(self) -> bool:
        """True if the text represents the token completely."""
        return self.data is None or "\ufffd" not in self.text or self.text.encode() == self.data


class TokenSpeller:
    """Spells tokens, special ones included, and caches every spelling; the vocabulary bounds the cache.

    ``table`` has the bytes of every token; None if a token's bytes are not fixed.
    """

    def __init__(self, tokenizer: Tokenizer, table: Mapping[int, bytes] | None) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._known: dict[int, Spelling] = {}

    def spell(self, token_id: int) -> Spelling:
        """The spelling of one token; empty for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> Spelling:
        if self._table is not None:
            data = self._table.get(token_id, b"")
            return Spelling(data.decode(errors="replace"), data)
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Spelling(text, None if "\ufffd" in text else text.encode())
