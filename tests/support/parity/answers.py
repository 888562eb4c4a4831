"""Answers of the API in a comparable form: streams are joined, and what differs from call to call is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

LOGPROB_TOLERANCE = 2e-4
"""Batches of different shapes round differently, so the last digits of a log-probability depend on the other requests
of a step.
"""

Answer = dict[str, Any]


def read_answer(response: httpx.Response) -> Answer:
    """The content of an answer, unstreamed or streamed: its choices and its usage.

    Left out is what no two answers have in common (id, time), and how much of the prompt was cached, which is what
    paths differ in.
    """
    assert response.status_code == httpx.codes.OK, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        body = _put_together(response.text)
    else:
        body = response.json()
    kept = {name: value for name, value in body.items() if name not in ("id", "created", "object")}
    for choice in kept["choices"]:
        for call in choice.get("message", choice.get("delta", {})).get("tool_calls", []):
            del call["id"]  # drawn
    kept["usage"] = {name: value for name, value in (body["usage"] or {}).items() if name != "prompt_tokens_details"}
    return kept


def forget_drafts(answer: Answer) -> None:
    """Remove the number of verified draft tokens from an answer."""
    details = answer["usage"].get("completion_tokens_details", {})
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        details.pop(name, None)
    if not details:
        answer["usage"].pop("completion_tokens_details", None)


def _put_together(text: str) -> Answer:
    """The answer that results from a stream's events; the stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", text
    whole: Answer = {"usage": None}
    choices: dict[int, Answer] = {}
    for line in lines[:-1]:
        event = json.loads(line)
        assert "error" not in event, line
        for choice in event.pop("choices"):
            _add(choices.setdefault(choice["index"], {}), choice)
        whole |= {name: value for name, value in event.items() if value is not None}
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


_GROWING = frozenset({"text", "content", "reasoning", "reasoning_content", "arguments"})
"""Fields that events append to; all others are sent once."""


def _add_calls(calls: list[Answer], pieces: list[Answer]) -> None:
    """Append pieces of calls to the calls that have begun."""
    for piece in pieces:
        if piece["index"] == len(calls):
            calls.append({})
        _add(calls[piece["index"]], piece)


def _add(so_far: Answer, part: Mapping[str, Any]) -> None:
    """Merge an event into the earlier ones: texts and lists grow, other fields keep their value."""
    for name, value in part.items():
        known = so_far.get(name)
        if isinstance(value, Mapping):
            so_far[name] = known or {}
            _add(so_far[name], value)
        elif name == "tool_calls":
            _add_calls(so_far.setdefault(name, []), value)
        elif isinstance(value, list) and known is not None:
            known.extend(value)
        elif isinstance(value, str) and known is not None and name in _GROWING:
            so_far[name] = known + value
        elif value is not None or name not in so_far:
            so_far[name] = value


def assert_same(actual: Any, expected: Any, *, where: str = "answer") -> None:
    """Check that answers are equal, except for the last digits of numbers that are not whole."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        assert set(actual) == set(expected), (where, actual, expected)
        for name, value in expected.items():
            assert_same(actual[name], value, where=f"{where}.{name}")
    elif isinstance(expected, list):
        assert isinstance(actual, list), where
        assert len(actual) == len(expected), (where, actual, expected)
        for index, value in enumerate(expected):
            assert_same(actual[index], value, where=f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=LOGPROB_TOLERANCE), where
    else:
        assert actual == expected, (where, actual, expected)


def is_same(actual: Answer, expected: Answer) -> bool:
    """True if ``assert_same`` accepts the answers."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True
