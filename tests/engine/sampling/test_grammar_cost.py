"""F1: a row whose grammar costs more and more ends, and the other rows do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from engine.contract.messages import SamplingParams
from engine.sampling.grammar.compiler import Grammar, GrammarStore
from engine.sampling.grammar.cost import FREE_S_PER_TOKEN, MAX_OVERRUN_S, CostClocks
from engine.sampling.grammar.masks import BatchMasks, GrammarMasks
from engine.sampling.token_history import TokenHistory
from tests.support.cluster.served_checkpoint import byte_tokenizer

GRAMMAR = "start: /a+/"
SLOW_S = 10 * FREE_S_PER_TOKEN
NUM_SLOW_STEPS = 3 + int(MAX_OVERRUN_S / (SLOW_S - 2 * FREE_S_PER_TOKEN))
LETTER_A = byte_tokenizer().encode("a").ids[0]


class Following:
    """Rows under one grammar, which say nothing but a; what is measured is what the test says."""

    def __init__(self, folder: Path) -> None:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        store, ended = GrammarStore(folder, vocab_size=300, eos_token_ids=(2,)), Event()
        store.on_end = ended.set
        assert store.poll(GRAMMAR) is None
        assert ended.wait(120)
        self._held = store.poll(GRAMMAR)
        assert isinstance(self._held, Grammar)
        self.cpu_s = self.wall_s = self.tick_s = self.joint_s = 0.0
        self.num_joint_readings = 0
        self.masks = GrammarMasks(store, CostClocks(cpu_s=self._read_cpu, wall_s=self._read_wall))
        self.history = TokenHistory(
            token_ids=np.full((4, 512), LETTER_A, np.int32), num_prompt_tokens=np.zeros(4, np.int32)
        )
        self.lengths = np.zeros(4, np.int32)

    def _read_cpu(self) -> float:
        self.cpu_s += self.tick_s
        return self.cpu_s

    def _read_wall(self) -> float:
        self.wall_s += self.joint_s
        self.num_joint_readings += 1
        return self.wall_s

    def begin(self, row: int) -> None:
        self.masks.set(row, SamplingParams(max_tokens=500, eos_token_ids=(2,), grammar=GRAMMAR))
        self.lengths[row] = 0

    def step(self, *rows: int, num_drafts: int = 0) -> BatchMasks:
        """The masks of these rows, each of which gets one more token afterwards."""
        numbers = np.repeat(np.array(rows, np.int32), num_drafts + 1)
        at = self.lengths[numbers] + np.tile(np.arange(num_drafts + 1, dtype=np.int32), len(rows))
        found = self.masks.take(np.arange(numbers.size), numbers, at, self.history)
        self.lengths[list(rows)] += 1
        return found

    def failed(self, rows: Sequence[int], *, num_steps: int, num_drafts: int = 0) -> list[int]:
        """The rows that failed in so many steps."""
        taken = [self.step(*rows, num_drafts=num_drafts) for _ in range(num_steps)]
        return sorted({failure.row for masks in taken for failure in masks.failures})


@pytest.fixture
def following(tmp_path: Path) -> Following:
    return Following(tmp_path)


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_f1_a_grammar_that_costs_too_much_over_many_tokens_ends_its_request(
    following: Following, num_drafts: int
) -> None:
    following.begin(0)
    following.tick_s = SLOW_S

    assert following.failed([0], num_steps=5, num_drafts=num_drafts) == []
    assert following.failed([0], num_steps=4 * NUM_SLOW_STEPS, num_drafts=num_drafts) == [0]
    [failure] = following.step(0).failures
    assert "takes too long" in failure.message
    assert "ask for a simpler one" in failure.message


@pytest.mark.behaviour("F1")
def test_f1_a_grammar_that_is_slow_now_and_then_goes_on(following: Following) -> None:
    """As long as it makes up for the time beyond its share."""
    following.begin(0)
    for _ in range(NUM_SLOW_STEPS):
        following.tick_s = SLOW_S
        assert following.failed([0], num_steps=1) == []
        following.tick_s = 0.0
        assert following.failed([0], num_steps=10) == []


@pytest.mark.behaviour("F1")
def test_f1_what_a_row_cost_is_no_matter_to_the_next_request_in_it(following: Following) -> None:
    following.begin(0)
    following.tick_s = SLOW_S
    following.failed([0], num_steps=NUM_SLOW_STEPS)
    following.tick_s = 0.0

    following.begin(0)

    assert following.failed([0], num_steps=3) == []


@pytest.mark.behaviour("F1")
def test_f1_rows_side_by_side_are_measured_once_they_took_long_together(following: Following) -> None:
    """Which of them it is only a measurement of each tells; nothing that takes its time waits for such a one."""
    for row in (0, 1, 2):
        following.begin(row)
    following.failed([0, 1, 2], num_steps=4)
    assert following.num_joint_readings == 8, "two readings a step"

    following.joint_s = 2 * FREE_S_PER_TOKEN
    following.step(0, 1, 2)
    before = following.num_joint_readings
    following.step(0, 1, 2)
    assert following.num_joint_readings == before, "one by one"

    following.joint_s = 0.0
    following.step(0, 1, 2)
    assert following.num_joint_readings == before + 2, "none was slow: together again"


@pytest.mark.behaviour("F1")
def test_f1_rows_beside_a_slow_one_go_on(following: Following) -> None:
    """It is measured alone from its first slow mask on."""
    following.begin(0)
    following.tick_s = SLOW_S
    following.step(0)
    for row in (1, 2):
        following.begin(row)
    following.tick_s = SLOW_S / 2  # two readings about each row's tokens, and two about the mask of a slow one
    following.masks._rows[0].cost.overrun_s = MAX_OVERRUN_S
    following.lengths[:] = 5

    assert [failure.row for failure in following.step(0, 1, 2).failures] == [0]
    following.tick_s = 0.0
    assert following.failed([1, 2], num_steps=5) == []
