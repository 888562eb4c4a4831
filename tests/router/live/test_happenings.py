"""Timeline entries for the difference between two states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import get_args

import pytest

from router.live.happenings import happenings
from router.live.sampler import State
from router.live.timeline import Kind
from tests.support.router.router_rig import router_rig


@pytest.fixture
async def state(model_dir: Path) -> State:
    async with router_rig(model_dir) as rig:
        return rig.service.live._sampler.sample()


@pytest.mark.parametrize(
    ("section", "name", "kind"),
    [
        ("totals", "drain_moves", "move"),
        ("totals", "ordered_moves", "move"),
        ("totals", "gap_moves", "rebalance"),
        ("totals", "migrations", "recovery"),
        ("totals", "recomputed_tokens", "recovery"),
        ("totals", "failed_blocks", "fault"),
        ("totals", "corrupt_blocks", "fault"),
        ("totals", "injected_faults", "fault"),
        ("totals", "refused", "refusal"),
        ("hand_overs", "count", "hand_over"),
        ("choices", "apart", "choice"),
    ],
)
async def test_counter_that_grew_is_one_entry(state: State, section: str, name: str, kind: str) -> None:
    after = copy.deepcopy(state)
    after[section][name] += 3

    (found,) = happenings(state, after)

    assert (found.kind, found.count) == (kind, 3)
    assert "3" in found.text


async def test_leaning_that_changed_is_told_with_its_reason(state: State) -> None:
    after = copy.deepcopy(state)
    after["workers"]["decode-0"]["leaning"] = "prefill"
    after["leanings"]["last_change"] = {"replica": "decode-0", "leaning": "prefill", "reason": "prompts wait"}

    (found,) = happenings(state, after)

    assert (found.kind, found.replica) == ("lean", "decode-0")
    assert found.text == "decode worker leans to prefill: prompts wait"


async def test_work_that_is_divided_and_no_longer_is_one_entry_each(state: State) -> None:
    divided = copy.deepcopy(state)
    divided["workers"]["prefill-0"]["keeps_to"], divided["workers"]["decode-0"]["keeps_to"] = "prompt", "stream"

    (began,) = happenings(state, divided)
    (ended,) = happenings(divided, state)

    assert (began.kind, began.text) == ("divide", "work is divided: workers for streams 1, for prompts 1")
    assert (ended.kind, ended.text) == ("divide", "work is not divided any more: all workers take any work")


async def test_pool_that_should_have_more_workers_is_told(state: State) -> None:
    after = copy.deepcopy(state)
    state["wanted"], after["wanted"] = {"decode": 2}, {"decode": 3, "prefill": 1}

    (found,) = happenings(state, after)

    assert (found.kind, found.text) == ("scale", "decode workers wanted: 3, 2 before")


async def test_number_that_a_router_decided_is_told_once(state: State) -> None:
    after = copy.deepcopy(state)
    state["wanted"], after["wanted"] = {"decode": 2}, {"decode": 3}
    after["sizes"]["17.000/decode"] = {"role": "decode", "wanted": 3, "before": 2, "reason": "4 requests/s expected"}

    (found,) = happenings(state, after)

    assert found.text == "decode: 3 workers instead of 2, 4 requests/s expected"


def test_every_kind_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "live-page.md").read_text()

    for kind in get_args(Kind):
        assert f"| `{kind}` |" in page


async def test_size_that_changed_is_told_with_its_reason(state: State) -> None:
    after = copy.deepcopy(state)
    after["sizes"]["17.000/decode"] = {"role": "decode", "wanted": 3, "before": 2, "reason": "4 requests/s expected"}

    (found,) = happenings(state, after)

    assert (found.kind, found.replica) == ("scale", None)
    assert found.text == "decode: 3 workers instead of 2, 4 requests/s expected"
    assert not list(happenings(after, state))


async def test_nothing_is_told_of_nothing(state: State) -> None:
    assert not list(happenings(state, copy.deepcopy(state)))
