"""The alerts: each is a query that Prometheus understands, asks for what is served, and is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.router_rig import router_rig
from tests.support.served_checkpoint import make_served_checkpoint

ROOT = Path(__file__).parents[2]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


async def test_alerts_ask_for_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    async with router_rig(make_served_checkpoint(tmp_path)) as rig:
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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pool_without_any_worker_is_told_though_nothing_has_its_rows(role: str) -> None:
    """A worker that is gone has no row: a sum over none is nothing, and never 0."""
    (rule,) = [rule for rule in rules() if rule["alert"] == "BatonPoolEmpty"]

    assert f'absent(baton:replica_up{{role="{role}"}})' in rule["expr"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_operations_page_says_what_an_alert_means(rule: dict[str, Any]) -> None:
    assert f"`{rule['alert']}`" in (ROOT / "docs" / "operations.md").read_text()
