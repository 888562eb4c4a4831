"""Which regexes are left out of the schemas of tools: those that llguidance refuses, and no others."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from router.grammar.pattern_reach import can_follow

FOLLOWED = [
    r"^a$|^b$",
    r"\Aab\z",
    r"\(?=a",
    r"[(?=]",
    r"[(?!]a",
    r"\\b",
    r"(?:a)(?i:b)(?-i:c)",
    r"(?i)abc",
    r"(?<n>a)(?P<o>b)",
    r"\u00e9\x41\t\f\v\r\a",
    r"[\w-.]+\/\-\_\ ",
    r"\p{L}\P{L}\S\D\W",
    r"a{2,}?b++",
    r"[^\]]\d+",
    "",
]
BEYOND = [
    r"^(?!x)a",
    r"(?=a)",
    r"a(?<=b)",
    r"a(?<!b)",
    r"\\(?=a)",
    r"[a](?!b)",
    r"(?>a)b",
    r"(?#c)a",
    r"(a)\1",
    r"(?P<n>a)(?P=n)",
    r"(?<n>a)\k<n>",
    r"\bfoo",
    r"foo\B",
    r"[\b]",
    r"\<a",
    r"(?m)^a$",
    r"a\Z",
    r"\cA",
    r"\0",
    r"\N{DIGIT ONE}",
]


def refusal(pattern: str) -> str:
    """Why llguidance refuses a text that must match; empty where it does not."""
    schema = {"type": "string", "pattern": pattern, "x-guidance": {"lenient": True}}
    return str(LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}), None))


@pytest.mark.parametrize("pattern", FOLLOWED)
def test_what_grammars_follow_stays(pattern: str) -> None:
    assert can_follow(pattern)
    assert not refusal(pattern)


@pytest.mark.parametrize("pattern", BEYOND)
def test_what_no_grammar_follows_is_known(pattern: str) -> None:
    assert not can_follow(pattern)
    assert refusal(pattern)


@pytest.mark.parametrize("pattern", ["((", "a\\", "[", "(?", "(?<"])
def test_a_regex_that_is_broken_off_is_looked_at_to_its_end(pattern: str) -> None:
    assert can_follow(pattern) is (pattern not in ("(?", "(?<"))
