"""Measuring the built-in model: its engines, which answers count as right, the effect of a missed goal, and the model
card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from benchmarks.tiny_model import GOALS, BatonAnswerer, Chat, accuracy_rows, missed_goals
from engine.model.builtin import builtin_model_dir
from scripts.train_tiny.card import write_card
from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.probes import Probe, add_probe, list_probe


class Parrot:
    """Says what it was told to say."""

    def __init__(self, answers: list[str]) -> None:
        self._answers = answers

    def answer(self, chats: Sequence[Chat]) -> list[str]:
        assert len(chats) == len(self._answers)
        return self._answers


def sums(number: int) -> list[Probe]:
    rng = Random(1)
    return [add_probe(rng) for _ in range(number)]


def test_only_the_whole_answer_counts() -> None:
    questions = sums(4)
    answers = [question.answer for question in questions]
    answers[0] += " And more."

    (row,) = accuracy_rows(Parrot(answers), questions, num_shown=0, engine="parrot")

    assert (row.name, row.value) == ("tiny_model.add", 75.0)
    assert row.detail == {"goal": GOALS["add"], "num_samples": 4, "engine": "parrot"}


def test_goal_that_is_missed_is_named() -> None:
    questions = [*sums(5), list_probe(Random(1))]
    answers = [question.answer for question in questions]
    answers[:2] = ["", ""]

    rows = accuracy_rows(Parrot(answers), questions, num_shown=0)

    assert missed_goals(rows) == ["tiny_model.add is 60.0 %, the goal 80 %"]


def test_baton_itself_answers_each_chat() -> None:
    chats = [
        (Message(role=Role.USER, text="What is 47 + 35?"),),
        (Message(role=Role.USER, text="Count from 7 to 9."),),
    ]

    assert BatonAnswerer(builtin_model_dir(), dtype="float32").answer(chats) == ["47 + 35 = 82.", "7, 8, 9"]


def rows_of(tasks: Sequence[str]) -> list[dict[str, object]]:
    run = {"machine": "A processor, 2 cores, Linux 6", "torch": "2", "transformers": "5"}
    return [
        {
            "name": f"tiny_model.{task}",
            "value": 97.25,
            "goal": 95,
            "num_samples": 40,
            "engine": "baton",
            "dtype": "float32",
        }
        | {"run": run}
        for task in tasks
    ]


def written(folder: Path, tasks: Sequence[str]) -> str:
    rows, stories = folder / "rows.json", folder / "stories.json"
    rows.write_text(json.dumps(rows_of(tasks)))
    stories.write_text(json.dumps({"fox": "A fox slept."}))
    write_card(folder, rows, stories, training="A step in a minute.", remarks="")
    return (folder / "README.md").read_text()


def test_card_says_what_was_measured_and_by_what(tmp_path: Path) -> None:
    card = written(tmp_path, list(GOALS))

    assert "`python -m benchmarks.tiny_model --engine baton`, in float32, on A processor, 2 cores, torch 2" in card
    assert card.count("| 97.2 % | 95 % | 40 |") == len(GOALS)
    assert "4,096 tokens a step. A step in a minute." in card
    assert "1. *fox*: A fox slept." in card


def test_card_of_a_task_that_was_not_measured_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="recall_500"):
        written(tmp_path, [task for task in GOALS if task != "recall_500"])
