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


def test_messages_wait_now_and_then_and_keep_their_order() -> None:
    ends_s = np.arange(20_000) * 0.002
    messages = Messages(RouterModel(message_s=0.001, message_wait_s=0.004), seed=5)

    times_s = np.array(messages.arrive(ends_s.tolist(), after_s=0.0))

    assert (np.diff(times_s) >= 0.0).all(), "many wait longer than the next step takes"
    assert (times_s - ends_s).min() >= 0.001 - 1e-9
    assert messages.arrive([1.0], after_s=7.0)[0] == 7.0, "behind what was sent before"


def test_messages_wait_as_long_as_the_model_says() -> None:
    messages = Messages(RouterModel(message_s=0.001, message_wait_s=0.004), seed=5)

    waits_s = [messages.arrive([0.0], after_s=0.0)[0] - 0.001 for _ in range(5000)]

    assert np.mean(waits_s) == pytest.approx(0.004, rel=0.1)
    assert np.percentile(waits_s, 99) == pytest.approx(0.004 * np.log(100), rel=0.2), "exponentially distributed"


def test_waits_of_messages_lengthen_some_gaps_and_change_nothing_else() -> None:
    load = make_load(LoadSpec(mix="balanced", shape="steady", rates={"balanced": 2.0}, seconds=10.0))
    quiet, busy = (
        simulate(
            unified(1, replace(CPU_CORE, step_noise=0.0, router=RouterModel(message_wait_s=wait_s))), load
        ).outcomes
        for wait_s in (0.0, 0.002)
    )

    late_s = [
        after - before
        for one, other in zip(quiet, busy, strict=True)
        for before, after in zip(one.token_times_s, other.token_times_s, strict=True)
    ]
    assert min(late_s) >= -1e-9
    assert np.mean(late_s) == pytest.approx(0.002, rel=0.2)
