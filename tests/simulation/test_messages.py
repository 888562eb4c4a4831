"""When tokens reach their clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulation.cluster import simulate
from simulation.layout import unified
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE, RouterModel
from simulation.messages import Messages

WAITING = RouterModel(message_s=0.001, message_wait_s=0.004)


def test_messages_wait_now_and_then_and_keep_their_order() -> None:
    ends_s = np.arange(20_000) * 0.002

    times_s = np.array(Messages(WAITING, name="a", seed=5).arrive(ends_s.tolist()))

    assert (np.diff(times_s) >= 0.0).all(), "many wait longer than the next step takes"
    assert (times_s - ends_s).min() >= 0.001 - 1e-9


@pytest.mark.parametrize("at_once", [1, 7])
def test_waits_are_the_same_however_many_steps_are_made_at_once(at_once: int) -> None:
    ends_s = (np.arange(70) * 0.002).tolist()
    messages, whole = Messages(WAITING, name="a", seed=5), Messages(WAITING, name="a", seed=5)

    parts = [messages.arrive(ends_s[at : at + at_once]) for at in range(0, len(ends_s), at_once)]

    assert [time_s for part in parts for time_s in part] == whole.arrive(ends_s)
    assert Messages(WAITING, name="b", seed=5).arrive(ends_s) != whole.arrive(ends_s)


def test_messages_wait_as_long_as_the_model_says() -> None:
    waits_s = [Messages(WAITING, name=str(number), seed=5).arrive([0.0])[0] - 0.001 for number in range(5000)]

    assert np.mean(waits_s) == pytest.approx(0.004, rel=0.1)
    assert np.percentile(waits_s, 99) == pytest.approx(0.004 * np.log(100), rel=0.2), "exponentially distributed"


def test_waits_of_messages_change_nothing_but_when_tokens_arrive() -> None:
    load = make_load(LoadSpec(mix="balanced", shape="steady", rates={"balanced": 2.0}, seconds=10.0))
    quiet, busy = (
        simulate(unified(1, replace(CPU_CORE, router=RouterModel(message_wait_s=wait_s))), load)
        for wait_s in (0.0, 0.002)
    )

    late_s = [
        after - before
        for one, other in zip(quiet.outcomes, busy.outcomes, strict=True)
        for before, after in zip(one.token_times_s, other.token_times_s, strict=True)
    ]
    assert busy.virtual_s == quiet.virtual_s, "no step waits for its messages"
    assert min(late_s) >= -1e-9
    assert np.mean(late_s) == pytest.approx(0.002, rel=0.2)
