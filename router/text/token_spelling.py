"""How single tokens are written where they stand alone, as in log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.text.tokenizer import Tokenizer


class Spelling(NamedTuple):
    """A token's text, in which bytes that are no character of their own are U+FFFD; ``data`` are its true bytes.

    ``data`` is None where the tokenizer has no bytes for single tokens.
    """

    text: str
    data: bytes | None

    @property
    def is_whole(self) -> bool:
        """True when the text says all."""
        return self.data is None or "\ufffd" not in self.text or self.text.encode() == self.data


class TokenSpeller:
    """Spells tokens, special ones included. What was spelt once is kept: there are only so many tokens.

    ``table`` has the bytes of every token, where each stands for fixed ones.
    """

    def __init__(self, tokenizer: Tokenizer, table: Mapping[int, bytes] | None) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._known: dict[int, Spelling] = {}

    def spell(self, token_id: int) -> Spelling:
        """One token; an id that no token of the tokenizer has is empty."""
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
