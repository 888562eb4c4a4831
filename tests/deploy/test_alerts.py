"""The alerts: each is a valid query for Prometheus, uses metrics that exist, and is documented."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.router.router_rig import router_rig

ROOT = Path(__file__).parents[2]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


class Wanted:
    """The configured numbers of a cluster."""

    def __init__(self, **numbers: int) -> None:
        self._numbers = numbers

    async def numbers(self, *, timeout_s: float) -> Mapping[str, int]:
        return self._numbers


async def test_alerts_ask_for_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    async with router_rig(make_served_checkpoint(tmp_path), wanted=Wanted(prefill=1, decode=1)) as rig:
        await rig.client.get("/ready")
        text = (await rig.client.get("/metrics")).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        labels.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for rule in rules():
        selectors = selectors_of(rule["expr"])
        assert selectors, rule["alert"]
        for selector in selectors:
            assert selector.name in labels, f"{rule['alert']}: {selector.name}"
            asked = {matcher.name for matcher in selector.matchers.matchers}
            assert asked <= labels[selector.name], f"{rule['alert']}: {selector.name} has no label {asked}"


def selectors_of(query: str) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(query), lambda node: found.append(node))
    return [node for node in found if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize(
    ("num_decode", "wanted", "fires"),
    [
        pytest.param(2, 2, False, id="all there"),
        pytest.param(1, 2, True, id="one lost"),
        pytest.param(1, 1, False, id="made smaller on purpose"),
        pytest.param(2, 1, False, id="one that still drains"),
    ],
)
async def test_pool_that_shrank_is_told_unless_it_was_meant_to(
    tmp_path: Path, num_decode: int, wanted: int, fires: bool
) -> None:
    (rule,) = [rule for rule in rules() if rule["alert"] == "BatonPoolShrank"]
    async with router_rig(
        make_served_checkpoint(tmp_path), num_decode=num_decode, wanted=Wanted(prefill=1, decode=wanted)
    ) as rig:
        await rig.client.get("/ready")
        text = (await rig.client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    told = instant_value(promql_parser.parse(rule["expr"]), samples)

    assert [labels for labels, _ in told] == ([{"role": "decode"}] if fires else [])


Rows = list[tuple[dict[str, str], float]]
COMPARED = {"==": operator.eq, "<": operator.lt}
SUMMED: dict[str, Any] = {"count": len, "max": max}


def instant_value(query: Any, samples: list[Sample]) -> Rows:
    """The value of a query at one instant, for the few kinds of query in our rules."""
    if isinstance(query, promql_parser.ParenExpr):
        return instant_value(query.expr, samples)
    if isinstance(query, promql_parser.NumberLiteral):
        return [({}, float(query.val))]
    if isinstance(query, promql_parser.VectorSelector):
        assert not list(query.matchers.matchers)
        return [(dict(sample.labels), sample.value) for sample in samples if sample.name == query.name]
    if isinstance(query, promql_parser.AggregateExpr):
        (label,) = query.modifier.labels
        groups: dict[str, list[float]] = {}
        for labels, value in instant_value(query.expr, samples):
            groups.setdefault(labels[label], []).append(value)
        return [({label: name}, float(SUMMED[str(query.op)](values))) for name, values in groups.items()]
    assert isinstance(query, promql_parser.BinaryExpr), f"{type(query)} is none of them"
    left, right = instant_value(query.lhs, samples), instant_value(query.rhs, samples)
    pairs = [(one, other) for one in left for other in right if other[0] in ({}, one[0])]
    return [one for one, other in pairs if COMPARED[str(query.op)](one[1], other[1])]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pool_without_any_worker_is_told_though_nothing_has_its_rows(role: str) -> None:
    """A worker that is gone has no row: a sum over none is nothing, and never 0."""
    (rule,) = [rule for rule in rules() if rule["alert"] == "BatonPoolEmpty"]

    assert f'absent(baton:replica_up{{role="{role}"}})' in rule["expr"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_operations_page_says_what_an_alert_means(rule: dict[str, Any]) -> None:
    assert f"`{rule['alert']}`" in (ROOT / "docs" / "operations.md").read_text()
