"""The rounds of `make soak`, and what it makes of their reports."""

from __future__ import annotations

import random

from benchmarks.memory_watch import MIB, Sample, WatchedProcess
from benchmarks.soak import KINDS, make_round, make_steady_round, pss_rows, rows_of
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


def test_last_round_breaks_nothing_and_has_prompts_of_all_lengths() -> None:
    scenario = make_steady_round(minutes=10, draw=random.Random(3))

    assert sum(step.sleep or 0 for step in scenario.steps) == 600
    assert all(step.sleep for step in scenario.steps)
    assert scenario.load.distinct >= 400
    assert scenario.load.prompt_tokens == (4, 900)


def test_figures_tell_the_largest_process_of_each_role_and_its_growth() -> None:
    def samples(growth: float) -> list[Sample]:
        return [Sample(at_s=5.0 * index, pss_bytes=int(MIB * (100 + index * growth))) for index in range(200)]

    def process(role: str, pid: int) -> WatchedProcess:
        return WatchedProcess(role=role, pid=pid, began_s=0.0)

    series = {
        process("prefill", 1): samples(0.0),
        process("prefill", 2): samples(1.0),
        process("proxy", 3): samples(9.0)[:3],
    }

    rows = {row.name: row for row in pss_rows(series)}

    assert rows["soak.pss.prefill"].value == 299
    assert rows["soak.pss.prefill"].detail["num_judged"] == 2
    assert 80 < float(rows["soak.pss.prefill"].detail["largest_growth_mib"]) < 100
    assert rows["soak.pss.proxy"].detail["num_judged"] == 0
