"""Answers read from their text in any pieces, and tokens compared with a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import llguidance
from tokenizers import AddedToken, Tokenizer

from router.text.tokenizer import Tokenizer as RouterTokenizer
from router.tools.tool import CallRules, Tool
from router.tools.turn import Turn
from router.tools.turn_parser import TurnParser
from tests.support.router.router_tokenizer import byte_level_tokenizer

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city"],
    },
)
STOP = Tool(name="stop")
ANY = CallRules(tools=(WEATHER, STOP))
REQUIRED = CallRules(tools=(WEATHER, STOP), must_call=True)
ONE = CallRules(tools=(STOP,), must_call=True, may_call_many=False)


def read(parser: TurnParser, pieces: Iterable[str]) -> Turn:
    """The turn that the pieces make; each call begins with its id and name, and its arguments follow it."""
    turn = Turn()
    for piece in pieces:
        turn.add(parser.push(piece))
    turn.add(parser.finish())
    return turn


def cut(text: str, places: Sequence[int]) -> list[str]:
    """A text in pieces."""
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def plain(turn: Turn) -> tuple[str, str, list[tuple[str, str]]]:
    """A turn without the ids of its calls, which are random."""
    return turn.reasoning, turn.content, [(call.name, call.arguments) for call in turn.calls]


def all_text(turn: Turn) -> str:
    """All texts of a turn, without their order."""
    return turn.reasoning + turn.content + "".join(call.name + call.arguments for call in turn.calls)


class GrammarRig:
    """A small tokenizer, with or without tokens for markers, and what grammars allow."""

    def __init__(self, *, special: Sequence[str] = (), added: Sequence[str] = ()) -> None:
        backend: Tokenizer = byte_level_tokenizer()
        backend.add_special_tokens([AddedToken(token, special=True) for token in special])
        backend.add_tokens([AddedToken(token, special=False) for token in added])
        self._backend = backend
        self.vocabulary = RouterTokenizer(backend)
        self._tokens = llguidance.LLTokenizer(backend.to_str())

    def allows(self, grammar: str, text: str) -> bool:
        """True if the text is a complete answer."""
        matcher = llguidance.LLMatcher(self._tokens, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return int(matcher.try_consume_tokens(ids)) == len(ids) and bool(matcher.is_accepting())

    def forced(self, grammar: str, text: str) -> str:
        """The text that must follow the beginning of an answer, as far as it is certain."""
        matcher = llguidance.LLMatcher(self._tokens, grammar)
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.consume_tokens(self._backend.encode(text, add_special_tokens=False).ids)
        return str(self._backend.decode(matcher.compute_ff_tokens(), skip_special_tokens=False))
