"""Reports between routers of two versions, as in a rolling update."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

from router.pool.pool_counters import DepartedWorker, ForgottenWorkers
from router.report.counters import RouterCounters
from router.report.metric_rows import MetricFamily, MetricRow, counter, render
from router.report.router_report import ForgottenRouters, RouterReport

RECORDED = """
gASV3wIAAAAAAACMG3JvdXRlci5yZXBvcnQucm91dGVyX3JlcG9ydJSMDFJvdXRlclJlcG9ydJSTlCmBlF2UKIwDb2xklEsHSwFLAksDSwSMFnJvdXRlci5y
ZXBvcnQuY291bnRlcnOUjA5Sb3V0ZXJDb3VudGVyc5STlCmBlE59lCiMDG51bV9yZXF1ZXN0c5RLBYwMbnVtX2ZpbmlzaGVklEsAjApudW1fZmFpbGVklEsA
jA1udW1fY2FuY2VsbGVklEsAjAtudW1fcmVmdXNlZJRLAIwRbnVtX3Byb21wdF90b2tlbnOUSwCMFG51bV9nZW5lcmF0ZWRfdG9rZW5zlEsGjBNudW1fcHJl
ZmlsbF9yZXRyaWVzlEsAjA5udW1fbWlncmF0aW9uc5RLAIwPbnVtX2RyYWluX21vdmVzlEsAjBJudW1fbG9jYWxfcHJlZmlsbHOUSwB1hpRijBlyb3V0ZXIu
cmVwb3J0Lm1ldHJpY19yb3dzlIwMTWV0cmljRmFtaWx5lJOUKYGUXZQojAdiYXRvbjp4lIwHY291bnRlcpSMBVRleHQulGgXjAlNZXRyaWNSb3eUk5SMBl90
b3RhbJSMAWGUjAFilIaUhZRHP/AAAAAAAACHlIGUhZRlYoWUfZSMBmRlY29kZZSMGXJvdXRlci5wb29sLnBvb2xfY291bnRlcnOUjA5EZXBhcnRlZFdvcmtl
cpSTlCmBlF2UKIwBZJSMAWmUfZSMAW6USwFzZWKFlHN9lGgraCyMEEZvcmdvdHRlbldvcmtlcnOUk5QpgZRdlCh9lGg0R0AAAAAAAAAAc2gxjAFqlIaUhZRl
YnMpjAkxMjcuMC4wLjGUaACMEEZvcmdvdHRlblJvdXRlcnOUk5QpgZRdlChoCCmBlE59lChoC0sIaAxLAGgNSwBoDksAaA9LAGgQSwBoEUsAaBJLAGgTSwBo
FEsAaBVLAHWGlGKMBW9sZGVylIWUZWJlYi4=
"""
"""``REPORT`` as the first version pickled it that any cluster may still run."""

REPORT = RouterReport(
    router_id="old",
    number=7,
    pid=1,
    created_s=2,
    num_alive=3,
    num_waiting=4,
    counters=RouterCounters(num_requests=5, num_generated_tokens=6),
    families=(counter("baton:x", "Text.", {(("a", "b"),): 1.0}),),
    departed={"decode": (DepartedWorker(replica_id="d", incarnation="i", counters={"n": 1}),)},
    forgotten={"decode": ForgottenWorkers(counters={"n": 2.0}, names=(("d", "j"),))},
    node_ip="127.0.0.1",
    forgotten_routers=ForgottenRouters(counters=RouterCounters(num_requests=8), names=("older",)),
)

TOLD = (RouterReport, RouterCounters, MetricFamily, DepartedWorker, ForgottenWorkers, ForgottenRouters)
NUM_FIRST_FIELDS = {
    RouterReport: 9,
    RouterCounters: 11,
    MetricFamily: 4,
    DepartedWorker: 3,
    ForgottenWorkers: 1,
    ForgottenRouters: 0,
}
"""Fields that each had in its first version; what came later has a default."""


class OtherVersion(pickle.Pickler):
    """Pickles as a version would whose dataclasses have other fields: ``change`` makes its states of ours."""

    def __init__(self, file: io.BytesIO, change: Callable[[Any, Any], Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._change = change

    def reducer_override(self, told: Any) -> Any:
        """The pickled form of one object."""
        if type(told) not in TOLD:
            return NotImplemented
        function, arguments, state, *_ = told.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return function, arguments, self._change(told, state)


def through(change: Callable[[Any, Any], Any], told: object) -> Any:
    """What arrives if such a version sends an object."""
    file = io.BytesIO()
    OtherVersion(file, change).dump(told)
    return pickle.loads(file.getvalue())


def newer(_told: object, state: Any) -> Any:
    """One field more at the end of each."""
    return (state[0], {**state[1], "num_new": 1}) if isinstance(state, tuple) else [*state, "new"]


def older(told: object, state: Any) -> Any:
    """Only what was there from the beginning."""
    num_fields = NUM_FIRST_FIELDS[type(told)]
    if isinstance(state, tuple):
        return state[0], dict(list(state[1].items())[:num_fields])
    return state[:num_fields]


def each(report: RouterReport) -> Iterator[object]:
    """The parts of a report."""
    yield from (report, report.counters, report.forgotten_routers, report.forgotten_routers.counters)
    yield from report.families
    yield from (worker for workers in report.departed.values() for worker in workers)
    yield from report.forgotten.values()


def test_report_of_the_first_version_is_read() -> None:
    assert pickle.loads(base64.b64decode(RECORDED)) == REPORT


def test_first_version_can_read_what_is_sent() -> None:
    """Frozen dataclasses were read by position and the counters by name: that cannot be changed any more."""
    for told in each(REPORT):
        state = told.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
        names = [item.name for item in fields(told)]  # type: ignore[arg-type]
        if isinstance(told, RouterCounters):
            assert state == (None, {name: getattr(told, name) for name in names})
        else:
            assert state == [getattr(told, name) for name in names]


def test_fields_of_a_newer_version_are_left_out() -> None:
    assert through(newer, REPORT) == REPORT


def test_fields_that_an_older_version_does_not_have_get_their_defaults() -> None:
    arrived = through(older, REPORT)

    assert arrived.router_id == "old"
    assert arrived.counters == REPORT.counters
    assert arrived.families == REPORT.families
    assert arrived.departed == REPORT.departed
    assert (arrived.forgotten, arrived.gone, arrived.node_ip, arrived.forgotten_routers.names) == ({}, (), None, ())


def test_counters_of_both_versions_add_up() -> None:
    fewer = through(
        lambda _told, state: (None, {"num_requests": state[1]["num_requests"]}), RouterCounters(num_requests=2)
    )
    more = through(newer, RouterCounters(num_requests=3, num_finished=1))

    assert fewer.plus(more) == more.plus(fewer) == RouterCounters(num_requests=5, num_finished=1)


def test_families_of_another_version_are_written_out() -> None:
    family = through(newer, counter("baton:x", "Text.", {(): 2.0}))

    assert "baton:x_total 2.0" in render([family.labelled(router="other")]).decode().replace('{router="other"}', "")


def test_what_is_lacking_without_a_default_is_named() -> None:
    with pytest.raises(TypeError, match="MetricFamily came without rows"):
        through(lambda _told, state: state[:3], MetricFamily(name="a", kind="gauge", text="b", rows=()))


def test_rows_stay_three_things() -> None:
    assert MetricRow._fields == ("suffix", "labels", "value")


@pytest.mark.parametrize("told", TOLD, ids=lambda told: str(told.__name__))
def test_fields_that_came_later_have_defaults(told: type[Any]) -> None:
    """The fields of the first version may have none."""
    later = fields(told)[NUM_FIRST_FIELDS[told] :]

    assert [item.name for item in later if item.default is MISSING and item.default_factory is MISSING] == []
