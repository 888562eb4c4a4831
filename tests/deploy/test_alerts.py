"""The alerts: each asks for metrics and labels that there are, and is explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
        asked = re.findall(r"(baton:[a-z_]+)(?:\{(\w+)=)?", rule["expr"])
        assert asked, rule["alert"]
        for name, label in asked:
            assert name in labels, f"{rule['alert']}: {name}"
            assert not label or label in labels[name], f"{rule['alert']}: {name} has no label {label}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_operations_page_says_what_an_alert_means(rule: dict[str, Any]) -> None:
    assert f"`{rule['alert']}`" in (ROOT / "docs" / "operations.md").read_text()
