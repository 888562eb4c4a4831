"""F1: grammars in GBNF are converted to Lark, in time proportional to their text."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from engine.contract.grammar import MAX_GRAMMAR_BYTES
from router.errors import InvalidRequestError
from router.grammar.checker import GrammarChecker
from router.grammar.gbnf import GbnfError, MaybeGbnf
from router.grammar.grammar_text import GrammarText, grammar_part
from router.grammar.structural_tag import structural_tag_grammar
from router.grammar.tag_formats import StructuralTagError

CONVERT = """
import resource, sys
from router.grammar.gbnf import GbnfError, MaybeGbnf

resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
try:
    MaybeGbnf(eval(sys.argv[1])).as_lark()
except GbnfError:
    pass
print("done")
"""
"""Converts in a process of its own, which may compute for 8 s. llguidance's way takes from 20 s to minutes."""

WORST = {
    "empty lines": r"""'root ::= "a"' + '\n' * 262_000""",
    "lines of spaces": r"""'root ::= "a"' + ' \n' * 131_000""",
    "words that nearly begin Lark": r"""'root ::= "a"' + '\nstart\n\n\n' * 26_000""",
    "rules that each name the next": (
        r"""'root ::= r0\n' + ''.join(f'r{n} ::= r{n + 1}\n' for n in range(14_000)) + 'r14000 ::= "a"'"""
    ),
    "such rules beside a long one": (
        r"""'root ::= r0\n' + ''.join(f'r{n} ::= r{n + 1}\n' for n in range(900))"""
        r""" + 'r900 ::= "a"\nlong ::= ' + '. ' * 110_000 + 'root'"""
    ),
    "brackets": r"""'root ::= ' + '(' * 262_000""",
    "comments": r"""'root ::= "a"' + '\n#' * 131_000""",
}


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("name", WORST)
def test_f1_the_time_for_gbnf_grows_with_its_text(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", CONVERT, WORST[name]], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "done", (done.returncode, done.stderr[-500:])


GBNF = (
    'root ::= "a" | b-c\nb-c ::= [a-z]+ d? # says something\nd ::= ("x" root){2,3}\n',
    '# first\n\n\nroot ::= sum\nsum ::= Term ("+" Term)*\nTerm ::= numBer | "(" sum ")"\nnumBer ::= [0-9]+\n',
    'root ::= a a\r\n\r\na ::= b b | root\r\nb ::= c{2}\r\nc ::= "\\"" | .\r\n',
    'root ::= a\na ::= a "x" | b\nb ::= "y" c\nc ::= "z"\nunused ::= c b',
    'a ::= b\nb ::= a\nroot ::= c a\nc ::= "::="',
)


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("text", GBNF)
def test_f1_gbnf_becomes_what_llguidance_makes_of_it(text: str) -> None:
    assert said(MaybeGbnf(text).as_lark()) == said(any_to_lark(text))


NAMES = [f"r{number}" for number in range(6)]


@given(
    rules=st.lists(st.lists(st.sampled_from([*NAMES, '"x"', "root"]), min_size=1, max_size=4), min_size=6, max_size=6)
)
def test_rules_in_any_order_become_what_llguidance_makes_of_them(rules: list[list[str]]) -> None:
    text = "\n".join(["root ::= r3 r0", *(f"{name} ::= {' '.join(to)}" for name, to in zip(NAMES, rules, strict=True))])

    assert said(MaybeGbnf(text).as_lark()) == said(any_to_lark(text))


@given(
    parts=st.lists(
        st.sampled_from(["\n", " ", "\t", "\r", "\x0b", "\x85", "start", "%llguidance", ":", "a", "::=", '"'])
    )
)
def test_lark_is_known_by_what_llguidance_knows_it_by(parts: list[str]) -> None:
    """A text that is left unchanged was recognized as Lark, which no other text may be."""
    text = "".join(parts)
    try:
        is_kept = MaybeGbnf(text).as_lark() == text
    except GbnfError:
        is_kept = False

    assert is_kept == is_lark_syntax(text)


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    "text", ["root ::= (", "root ::= a", 'b ::= "a"', 'root ::= "' + "x" * 9 + "\n::=", "root ::= " + "(" * 9000]
)
async def test_f1_what_is_no_gbnf_is_refused(text: str) -> None:
    checker = GrammarChecker()

    with pytest.raises(InvalidRequestError, match="'x' is invalid: it looks like GBNF, but is not valid: "):
        await checker.check(GrammarText((grammar_part(text),)), param="x")

    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_gbnf_is_converted_off_the_event_loop() -> None:
    """An error at the end of a long text is found while the event loop continues."""
    checker = GrammarChecker()
    text = "root ::= " + '"a" ' * 50_000 + ")"
    turns = 0

    checking = asyncio.create_task(checker.check(GrammarText((grammar_part(text),)), param="x"))
    while not checking.done():
        turns += 1
        await asyncio.sleep(0)

    assert isinstance(checking.exception(), InvalidRequestError)
    assert turns > 10
    checker.close()


def tag_of(*texts: str) -> GrammarText:
    elements = [{"type": "grammar", "grammar": text} for text in texts]
    return structural_tag_grammar({"format": {"type": "sequence", "elements": elements}})


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("text", ['start: "a"' + " " * MAX_GRAMMAR_BYTES, 'root ::= "a"' + " " * MAX_GRAMMAR_BYTES])
def test_f1_a_grammar_in_a_tag_is_bounded(text: str) -> None:
    with pytest.raises(
        StructuralTagError, match=f"^format.elements.0.grammar has .* the limit is {MAX_GRAMMAR_BYTES}$"
    ):
        tag_of(text)


@pytest.mark.behaviour("F1")
async def test_f1_the_grammars_in_a_tag_are_bounded_together() -> None:
    checker = GrammarChecker()
    half = 'root ::= "a"' + " " * (MAX_GRAMMAR_BYTES // 2)

    with pytest.raises(InvalidRequestError, match=r"its GBNF has .* characters, the limit is"):
        await checker.check(tag_of(half, half), param="x")

    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_a_grammar_in_a_tag_that_is_none_is_named() -> None:
    checker = GrammarChecker()

    with pytest.raises(
        InvalidRequestError, match=r"'x' is invalid: format\.elements\.1\.grammar looks like GBNF, but is not valid"
    ):
        await checker.check(tag_of('root ::= "a"', "root ::= ("), param="x")

    checker.close()


def said(lark: str) -> list[str]:
    """The lines of a grammar that say something."""
    return [line for line in lark.splitlines() if line]
