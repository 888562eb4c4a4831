"""Log-probabilities in OpenAI's formats of the two endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.contract.messages import LogprobTable, TokenLogprobs
from router.text.detokenizer import Detokenizer
from router.text.logprob_trail import TokenEntry
from router.text.token_spelling import TokenSpeller

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """One token of a text: where its text begins, and its log-probabilities; a prompt's first token has none."""

    token_id: int
    start: int
    said: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsAnswer:
    """Writes log-probabilities of tokens. With ``as_token_ids`` tokens are written as ``token_id:5``.

    ``num_top`` is how many of the most likely tokens are listed for each. ``detokenizer`` makes a detokenizer that
    locates a prompt's tokens in its text.
    """

    speller: TokenSpeller
    num_top: int
    detokenizer: Callable[[], Detokenizer]
    as_token_ids: bool = False

    def completion(self, tokens: Sequence[PlacedToken]) -> dict[str, Sequence[object]]:
        """The field ``logprobs`` of a text's choice."""
        return {
            "text_offset": [token.start for token in tokens],
            "token_logprobs": [None if token.said is None else _finite(token.said.logprobs[0]) for token in tokens],
            "tokens": [self._name(token.token_id) for token in tokens],
            "top_logprobs": [None if token.said is None else self._by_name(token.said) for token in tokens],
        }

    def chat_json(self, entries: Sequence[TokenEntry]) -> str:
        """The field ``logprobs`` of a chat's choice as JSON."""
        return f'{{"content": [{", ".join(self.chat_rows(entries))}], "refusal": null}}'

    def chat_rows(self, entries: Sequence[TokenEntry], *, has_bytes: bool = False) -> Iterator[str]:
        """The entry of each token, as JSON. They are separate, because one call for all would block other threads.

        With ``has_bytes`` a token with unknown bytes has an empty list of bytes, not null.
        """
        for entry in entries:
            row = self._chat_entry(entry.said)
            if has_bytes and row["bytes"] is None:
                row["bytes"] = []
            yield json.dumps(row)

    def completion_json(self, tokens: Sequence[PlacedToken]) -> str:
        """The same as JSON."""
        return _rows_json(self.completion(tokens))

    def placed_prompt(self, token_ids: Sequence[int], text: str, table: LogprobTable) -> list[PlacedToken]:
        """Locate a prompt's tokens in its text, which may lack special tokens around it, or the first token's space.

        Any part of a token that is outside of the text is ignored.
        """
        detokenizer = self.detokenizer()
        starts: list[int] = []
        decoded = ""
        for token_id in token_ids:
            starts.append(len(decoded))
            decoded += detokenizer.push((token_id,))
        decoded += detokenizer.finish()
        num_before = len(decoded) - len(text) if decoded.endswith(text) else max(decoded.find(text), 0)
        said = [None, *(table.entry(index, self.num_top) for index in range(len(token_ids) - 1))]
        return [
            PlacedToken(token_id, min(max(start - num_before, 0), len(text)), entry)
            for token_id, start, entry in zip(token_ids, starts, said, strict=True)
        ]

    def _chat_entry(self, said: TokenLogprobs) -> dict[str, object]:
        last = 1 + self.num_top
        top = zip(said.token_ids[1:last], said.logprobs[1:last], strict=True)
        return {
            **self._chat_token(said.token_ids[0], said.logprobs[0]),
            "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in top],
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, object]:
        spelling = self.speller.spell(token_id)
        data = None if spelling.data is None else list(spelling.data)
        name = f"token_id:{token_id}" if self.as_token_ids else spelling.text
        return {"token": name, "logprob": _finite(logprob), "bytes": data}

    def _by_name(self, said: TokenLogprobs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in zip(said.token_ids, said.logprobs, strict=True):
            named.setdefault(self._name(token_id), _finite(logprob))
        return named

    def _name(self, token_id: int) -> str:
        """A token as OpenAI's text completions write it: bytes that form no character as escapes."""
        if self.as_token_ids:
            return f"token_id:{token_id}"
        spelling = self.speller.spell(token_id)
        if spelling.is_whole or spelling.data is None:
            return spelling.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling.data)


def placed(entries: Sequence[TokenEntry], offset: int) -> list[PlacedToken]:
    """The positions of output tokens in a text that begins ``offset`` characters before the output."""
    return [PlacedToken(entry.said.token_ids[0], offset + entry.start, entry.said) for entry in entries]


def prompt_logprobs_json(table: LogprobTable, speller: TokenSpeller, *, num_top: int) -> str:
    """The field ``prompt_logprobs`` as JSON, by token id; null for the first token."""
    answer = ["null"]
    for index in range(len(table.ranks)):
        said = table.entry(index, num_top)
        ranks = (said.rank, *range(1, len(said.token_ids)))
        by_id: dict[str, object] = {}
        for token_id, logprob, rank in zip(said.token_ids, said.logprobs, ranks, strict=True):
            fields = {"logprob": _finite(logprob), "rank": rank, "decoded_token": speller.spell(token_id).text}
            by_id.setdefault(str(token_id), fields)
        answer.append(json.dumps(by_id))
    return f"[{','.join(answer)}]"


def _rows_json(fields: Mapping[str, Sequence[object]]) -> str:
    """Lists as JSON, row by row, because one call for a whole prompt would block all other threads."""
    lists = (f"{json.dumps(name)}:[{','.join(map(json.dumps, rows))}]" for name, rows in fields.items())
    return f"{{{','.join(lists)}}}"


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
