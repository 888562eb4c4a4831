"""The rounds of `make soak`, and what it makes of their reports."""

from __future__ import annotations

import random

from benchmarks.soak import KINDS, make_round, rows_of
from cluster.chaos.report import ChaosReport, FaultRecord

UPDATE = ["baton", "deploy", "--config", "changed.yaml"]


def test_round_has_every_kind_once_in_an_order_that_the_seed_gives() -> None:
    scenario, order = make_round(1, draw=random.Random(3), kinds=list(KINDS), update=UPDATE)
    again, same_order = make_round(1, draw=random.Random(3), kinds=list(KINDS), update=UPDATE)
    _, other_order = make_round(1, draw=random.Random(4), kinds=list(KINDS), update=UPDATE)

    assert sorted(order) == sorted(KINDS)
    assert (again, same_order) == (scenario, order)
    assert other_order != order
    assert scenario.load.streams >= 16
    assert [step.run.command for step in scenario.steps if step.run is not None] == [UPDATE]


def test_figures_tell_the_pauses_of_each_kind_apart() -> None:
    order = ["both killed", "decode drained"]
    faults = [
        FaultRecord(what="kill prefill", began_s=1, whole_s=9, longest_pause_s=2),
        FaultRecord(what="kill decode", began_s=1, whole_s=11, longest_pause_s=4),
        FaultRecord(what="drain", began_s=20, whole_s=5, longest_pause_s=1),
    ]
    memory = {"prefill 1": [100], "decode 2": [200], "router 3": [300]}
    report = ChaosReport(scenario="x", num_requests=5, num_lost=1, faults=faults, memory_bytes=memory)

    rows = {row.name: row for row in rows_of([(order, report), (order, report)])}

    assert rows["soak.lost"].value == 2
    assert rows["soak.both_killed.longest_pause"].value == 4
    assert rows["soak.both_killed.longest_pause"].detail["num"] == 4
    assert rows["soak.decode_drained.longest_pause"].detail["max_whole_s"] == 5
    assert rows["soak.memory_growth.decode"].value == 1.0
