"""``call:name{key:value,...}`` between markers, with marked strings: FunctionGemma, Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.grammar.lark import TEXT_RULE, literal
from router.tools.call_parser import NAME, CallParser, CallSyntax
from router.tools.formats.gemma_arguments import GemmaObject
from router.tools.formats.gemma_grammar import GemmaGrammar
from router.tools.lark import Vocabulary, marker, text_until
from router.tools.tool import CallRules
from router.tools.turn_parser import TurnParser


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaFormat:
    """Markers around each call, any text before the calls, and a marker on both sides of each string."""

    name: str
    begin: str
    end: str
    quote: str
    answer_head: tuple[str, ...] = field(default=(), init=False)

    @property
    def markers(self) -> tuple[str, ...]:
        """All three markers."""
        return (self.begin, self.end, self.quote)

    def is_spoken_by(self, template: str) -> bool:
        """True if the template writes earlier turns' calls in this format."""
        return self.begin in template

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow."""
        grammar = GemmaGrammar(marker(self.quote, vocabulary), text_until("quoted", self.quote, vocabulary))
        bodies = [f"{literal(f'call:{tool.name}')} {grammar.arguments(tool)}" for tool in rules.tools]
        begin, end = marker(self.begin, vocabulary), marker(self.end, vocabulary)
        lines = [f"call: ({' | '.join(bodies)}) {end}", *grammar.rules, TEXT_RULE]
        if rules.calls_alone:
            repeat = f"({begin} call)*" if rules.may_call_many else ""
            return "\n".join([f"start: {begin} call {repeat}", *lines])
        start = "start: (begin call)* TEXT" if rules.may_call_many else "start: begin call | TEXT"
        return "\n".join([start, text_until("begin", self.begin, vocabulary), *lines])

    def parser(self, rules: CallRules) -> TurnParser:
        """A parser for one answer."""
        syntax = CallSyntax(begin=self.begin, head=f"call:{NAME}", tail=self.end)
        return CallParser(syntax, rules.names, read_arguments=lambda: GemmaObject(self.quote))
