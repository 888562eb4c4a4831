"""The dashboard only uses metrics that a cluster has, in queries that Prometheus understands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from router.service import RouterService
from scripts.dashboard import dashboard
from tests.support.engine.engine_pools import engine_pools
from tests.support.router.router_rig import FAST, until

FILE = Path(__file__).resolve().parents[3] / "deploy" / "dashboards" / "baton.json"
TARGET_LABELS = {"job", "instance"}
"""Prometheus itself adds them to whatever it scrapes."""


def queries() -> list[str]:
    panels: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [text.replace("$__rate_interval", "5m").replace("$job", "baton") for text in found]


def nodes(query: str) -> Iterator[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(query), lambda node: found.append(node))
    yield from found


async def scrape(model_dir: Path) -> list[Sample]:
    """The metrics of a router over real engines after a request."""
    async with engine_pools() as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, FAST)
        await service.start()
        try:
            await until(service.decode_pool.has_introduced)
            service.metrics.answered("/v1/completions", "POST", 200)
            text = (await service.view.metrics_text()).decode()
        finally:
            await service.close()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_file_is_what_the_script_writes() -> None:
    assert json.loads(FILE.read_text()) == dashboard()


def test_every_query_parses_and_names_no_variable_that_is_not_there() -> None:
    assert len(queries()) > 40
    for query in queries():
        assert "$" not in query
        assert list(nodes(query))


async def test_every_metric_and_label_of_a_query_is_served(model_dir: Path) -> None:
    labels: dict[str, set[str]] = {}
    for sample in await scrape(model_dir):
        labels.setdefault(sample.name, set()).update(sample.labels)

    for query in queries():
        selectors = [node for node in nodes(query) if isinstance(node, promql_parser.VectorSelector)]
        assert selectors, query
        for selector in selectors:
            assert selector.name in labels, f"{selector.name} is not served"
            matched = {matcher.name for matcher in selector.matchers.matchers}
            assert matched <= labels[selector.name] | TARGET_LABELS, query
        served = set.union(*(labels[selector.name] for selector in selectors))
        grouped = {
            label
            for node in nodes(query)
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
            for label in node.modifier.labels
        }
        assert grouped <= served, query


def test_legends_use_only_labels_that_their_query_keeps() -> None:
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel.get("targets", ()):
            used = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            kept = {
                label
                for node in nodes(target["expr"].replace("$__rate_interval", "5m"))
                if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
                for label in node.modifier.labels
            }
            assert used <= kept, target
