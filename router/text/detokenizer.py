"""Converts tokens to text as they arrive: never half a character, never two calls of the tokenizer per token.

Most tokenizers map each token to fixed bytes, independent of its neighbours (byte-level BPE, sentencepiece with byte
fallback). For those a table of bytes is built once, and the text is an incremental UTF-8 decode: exact, and one
dictionary look-up per token. Any other tokenizer decodes a short window twice, without and with the new tokens, and
the difference is the new text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import tokenizers

from router.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 6
_LONG_WINDOW_TOKENS = 4 * _WINDOW_TOKENS
_MOST_BYTES = 4
"""Of a character, and so the tokens that it may be cut into."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """The text of one output, piece by piece."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; return the characters that they complete."""

    @property
    def is_incomplete(self) -> bool:
        """True while the text of some token is not complete."""

    def finish(self) -> str:
        """Return the remaining text; bytes of an incomplete character become U+FFFD. Call once, at the end."""


class ByteDetokenizer:
    """For tokenizers in which each token stands for fixed bytes."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; return the characters that they complete."""
        table = self._table
        if len(token_ids) == 1:
            return self._decoder.decode(table.get(token_ids[0], b""))
        return self._decoder.decode(b"".join([table.get(token_id, b"") for token_id in token_ids]))

    @property
    def is_incomplete(self) -> bool:
        """True while a character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """Return the rest of an incomplete character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a short window around the new tokens.

    ``context_ids`` are the last tokens before the output; they decide whether a space precedes the first word.
    Tokens for which ``is_spelt`` is false are left out everywhere.
    """

    __slots__ = ("_decode", "_is_spelt", "_num_settled", "_num_shown", "_tokens")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context_ids: Sequence[int],
        is_spelt: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._decode = decode
        self._is_spelt = is_spelt
        most = _WINDOW_TOKENS + _MOST_BYTES - 1
        self._tokens = list(islice(filter(is_spelt, reversed(context_ids)), most))[::-1]
        self._num_shown = 0
        self._shorten()
        self._num_settled = len(self._tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; return the characters that they complete."""
        new = list(filter(self._is_spelt, token_ids))
        if len(new) > 1 and self._decode(self._tokens + new).endswith(_REPLACEMENT):
            # Only one by one they tell with which of them the last character begins, and so how long it may take.
            return "".join([self._take([token_id]) for token_id in new])
        return self._take(new)

    def _take(self, token_ids: list[int]) -> str:
        self._tokens.extend(token_ids)
        if not self.is_incomplete:
            return ""
        whole = self._decode(self._tokens)
        text = whole[self._num_shown :]
        # A replacement character at the end is most likely an incomplete character, so wait. But a character has at
        # most four bytes: if more tokens than that are waiting, their bytes are simply invalid.
        if text.endswith(_REPLACEMENT) and len(self._tokens) - self._num_settled <= _WINDOW_TOKENS:
            return ""
        if text:
            self._shorten()
        elif len(self._tokens) > _LONG_WINDOW_TOKENS:
            self._leave_out_silent(whole)
        self._num_settled = len(self._tokens)
        return text

    @property
    def is_incomplete(self) -> bool:
        """True while tokens wait for the ones after them."""
        return len(self._tokens) > self._num_settled

    def finish(self) -> str:
        """Return the remaining text."""
        text = self._decode(self._tokens)[self._num_shown :]
        self._num_settled = len(self._tokens)
        return text

    def _shorten(self) -> None:
        """Keep a few tokens, all of which are shown.

        They begin with a whole character: behind half of one, some decoders take all bytes that follow for wrong ones.
        """
        for size in range(_WINDOW_TOKENS, _WINDOW_TOKENS + _MOST_BYTES):
            text = self._decode(self._tokens[-size:])
            if _REPLACEMENT not in text:
                break
        else:
            size = _WINDOW_TOKENS
            text = self._decode(self._tokens[-size:])
        self._tokens, self._num_shown = self._tokens[-size:], len(text)

    def _leave_out_silent(self, whole: str) -> None:
        """Drop the middle of a long run of tokens without text: only the words before it and its end matter."""
        ends = self._tokens[:_WINDOW_TOKENS] + self._tokens[-_WINDOW_TOKENS:]
        if self._decode(ends) == whole:
            self._tokens = ends


class DetokenizerFactory:
    """Makes the detokenizer that fits a tokenizer. The tables are built once and shared.

    ``table`` has the bytes of every token; None if a token's bytes depend on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.table = token_bytes(tokenizer.backend)
        self._tables: dict[frozenset[int], dict[int, bytes]] = {}

    def make(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A detokenizer for an output that follows a prompt. ``shown`` are special tokens that are never skipped."""
        skipped = self._tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        if self.table is not None:
            return ByteDetokenizer(self._table_without(skipped))

        def decode(token_ids: list[int]) -> str:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens and not shown)

        def is_spelt(token_id: int) -> bool:
            return token_id not in skipped and self._tokenizer.token_strings([token_id])[0] is not None

        return WindowDetokenizer(decode, prompt_token_ids, is_spelt)

    def _table_without(self, skipped: frozenset[int]) -> dict[int, bytes]:
        """The table without some tokens. Cached, since there are only as many such sets as ways to read answers."""
        assert self.table is not None
        if not skipped:
            return self.table
        known = self._tables.get(skipped)
        if known is None:
            known = {token_id: data for token_id, data in self.table.items() if token_id not in skipped}
            self._tables[skipped] = known
        return known


def token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """The bytes of every token; None when a token's text depends on its neighbours."""
    decoder = json.loads(backend.to_str())["decoder"]
    to_bytes = _byte_rule(decoder)
    if to_bytes is None:
        return None
    spellings: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return {token_id: to_bytes(text) for text, token_id in spellings.items()}


def _byte_rule(decoder: dict[str, object] | None) -> Callable[[str], bytes] | None:
    """The function from a token's spelling to its bytes; None if the decoder depends on anything else."""
    if decoder is None:
        return None
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
        assert isinstance(parts, list)
        if len(parts) == 1:
            return _byte_rule(parts[0])
        return _sentencepiece_rule(parts)
    if decoder["type"] == "ByteLevel":
        return _byte_level_rule()
    if decoder["type"] == "Metaspace":
        mark = str(decoder.get("replacement", "\u2581"))
        return lambda text: text.replace(mark, " ").encode()
    return None


def _sentencepiece_rule(parts: list[dict[str, object]]) -> Callable[[str], bytes] | None:
    """Replace the space mark, map byte tokens to bytes, fuse; a strip at the start affects only whole texts."""
    replacements: list[tuple[str, str]] = []
    has_byte_fallback = False
    for part in parts:
        kind = part["type"]
        if kind == "Replace" and isinstance(pattern := part["pattern"], dict) and "String" in pattern:
            replacements.append((pattern["String"], str(part["content"])))
        elif kind == "Metaspace":
            replacements.append((str(part.get("replacement", "\u2581")), " "))
        elif kind == "ByteFallback":
            has_byte_fallback = True
        elif not (kind == "Fuse" or (kind == "Strip" and part.get("stop") == 0)):
            return None

    def to_bytes(text: str) -> bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(text) if has_byte_fallback else None
        return bytes([int(match.group(1), 16)]) if match else text.encode()

    return to_bytes


def _byte_level_rule() -> Callable[[str], bytes]:
    """Byte-level BPE spells each byte as one printable character. Source: Radford et al., GPT-2, 2019."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})

    def to_bytes(text: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in text])
        except KeyError:
            return text.encode()

    return to_bytes
