"""Writes deploy/dashboards/baton.json, for Grafana: `python -m scripts.dashboard > deploy/dashboards/baton.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

NUM_COLUMNS = 24
WIDTH = 8
HEIGHT = 8
QUANTILES = (0.5, 0.9, 0.99)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PICKED = 'job=~"$job"'
"""Every query is held to the scrape jobs that were picked at the top of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart: queries by the legend of their lines."""

    title: str
    about: str
    unit: str
    lines: dict[str, str]
    is_stacked: bool = False


def rate(name: str, *, by: str = "", where: str = "") -> str:
    """Growth a second of a counter, summed."""
    matchers = f"{PICKED}, {where}" if where else PICKED
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate(baton:{name}{{{matchers}}}[$__rate_interval]))"


def now(name: str, *, by: str) -> str:
    """A gauge, summed."""
    return f"sum by ({by}) (baton:{name}{{{PICKED}}})"


def quantiles(name: str) -> dict[str, str]:
    """Some quantiles of a histogram of times."""
    buckets = rate(f"{name}_bucket", by="le")
    return {f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in QUANTILES}


def ratio(part: str, whole: str) -> str:
    """One rate over another, nothing where the other is 0."""
    return f"{part} / ({whole} > 0)"


def times(title: str, name: str, about: str) -> Panel:
    """Quantiles of one part of a request's time."""
    return Panel(title=title, about=about, unit="s", lines=quantiles(f"{name}_seconds"))


def mean_seconds(name: str) -> str:
    """The mean of a histogram of times."""
    return ratio(rate(f"{name}_seconds_sum"), rate(f"{name}_seconds_count"))


ROWS: dict[str, tuple[Panel, ...]] = {
    "What users see": (
        times(
            "Time to first token", "time_to_first_token", "From acceptance to the first token; no transfer is in it."
        ),
        times("Between tokens", "inter_token_latency", "Each token after the first, as the router got it."),
        times("Whole requests", "e2e_request_latency", "From acceptance to the finish."),
        Panel(
            title="Ends",
            about="Sequences by how they ended. `abort` is a client that left.",
            unit="reqps",
            lines={"{{reason}}": rate("request_finishes_total", by="reason")},
            is_stacked=True,
        ),
        Panel(
            title="HTTP answers",
            about="By status code.",
            unit="reqps",
            lines={"{{code}}": rate("http_requests_total", by="code")},
            is_stacked=True,
        ),
        Panel(
            title="Tokens",
            about="Prompt tokens of answered requests, and generated tokens.",
            unit="short",
            lines={"prompt": rate("prompt_tokens_total"), "generated": rate("generation_tokens_total")},
        ),
    ),
    "Where the time goes": (
        Panel(
            title="Mean of each part",
            about="Queue, prefill and decode add up to the whole; the hand-over is a part of decode.",
            unit="s",
            lines={part: mean_seconds(f"request_{part}_time") for part in ("queue", "prefill", "handover", "decode")},
        ),
        times("Queue", "request_queue_time", "Waiting for room on a decode replica, and in the prefill engine."),
        times("Prefill", "request_prefill_time", "Computing the prompt, up to the first token."),
        times("Hand-over", "request_handover_time", "From the first token to the second: moving the KV, and one step."),
        times("Decode", "request_decode_time", "From the first token to the last."),
        Panel(
            title="Prompt and answer lengths",
            about="Means over finished requests.",
            unit="short",
            lines={
                kind: ratio(rate(f"request_{kind}_tokens_sum"), rate(f"request_{kind}_tokens_count"))
                for kind in ("prompt", "generation")
            },
        ),
    ),
    "Workers": (
        Panel(
            title="KV cache in use",
            about="Share of the blocks of each replica.",
            unit="percentunit",
            lines={"{{role}} {{replica}}": now("kv_cache_usage_ratio", by="role, replica")},
        ),
        Panel(
            title="Running, waiting, loading",
            about="Requests by what the engines do with them.",
            unit="short",
            lines={
                f"{state} {{{{role}}}}": now(f"num_requests_{state}", by="role")
                for state in ("running", "waiting", "loading")
            },
        ),
        Panel(
            title="Waiting for admission",
            about="Sequences for which no decode replica has room, and all in progress, by router.",
            unit="short",
            lines={
                "waiting {{router}}": now("router_requests_waiting", by="router"),
                "in progress {{router}}": now("router_requests_in_progress", by="router"),
            },
        ),
        Panel(
            title="Prefix cache",
            about="Share of the looked-up prompt tokens whose KV was there, or came from another engine.",
            unit="percentunit",
            lines={
                "{{role}} {{source}}": (
                    f"{rate('prefix_cache_hit_tokens_total', by='role, source')} / ignoring(source) group_left() "
                    f"({rate('prefix_cache_queried_tokens_total', by='role')} > 0)"
                )
            },
        ),
        Panel(
            title="Engine steps",
            about="Share of the time that each engine spends in steps.",
            unit="percentunit",
            lines={"{{role}} {{replica}}": rate("engine_step_seconds_total", by="role, replica")},
        ),
        Panel(
            title="Replicas and routers that answer",
            about="By role.",
            unit="short",
            lines={"{{role}}": now("replica_up", by="role"), "router": f"sum(baton:router_up{{{PICKED}}})"},
        ),
    ),
    "Hand-over and trouble": (
        Panel(
            title="KV moved",
            about="Bytes read from other engines.",
            unit="Bps",
            lines={"{{replica}}": rate("kv_transfer_bytes_total", by="replica")},
        ),
        Panel(
            title="Loads",
            about="Loads of KV that ended, those that failed, and blocks with a wrong checksum.",
            unit="ops",
            lines={
                "all": rate("kv_transfers_total"),
                "failed": rate("kv_transfer_failures_total"),
                "corrupt blocks": rate("kv_transfer_corrupt_blocks_total"),
            },
        ),
        Panel(
            title="Time of a load",
            about="Mean, from its order to its end.",
            unit="s",
            lines={"mean": ratio(rate("kv_transfer_seconds_total"), rate("kv_transfers_total"))},
        ),
        Panel(
            title="Leases",
            about="How leases on KV blocks ended. Expired ones cost a recomputation.",
            unit="ops",
            lines={end: rate(f"leases_{end}_total") for end in ("done", "expired", "aborted")},
        ),
        Panel(
            title="Lost and computed again",
            about="Blocks that were not fetched, tokens computed again, and preemptions.",
            unit="short",
            lines={
                "failed blocks": rate("failed_blocks_total"),
                "recomputed tokens": rate("recomputed_tokens_total"),
                "preemptions": rate("preemptions_total"),
            },
        ),
        Panel(
            title="Retries and alarms",
            about="Prompts sent elsewhere, sequences moved, requests turned away; NaN logits and blocks "
            "that do not add up should never happen.",
            unit="ops",
            lines={
                "prefill retries": rate("prefill_retries_total"),
                "moved": rate("migrations_total"),
                "prompts computed on decode": rate("local_prefills_total"),
                "refused": rate("requests_refused_total"),
                "NaN logits": rate("nan_logits_total"),
                "integrity failures": rate("integrity_failures_total"),
            },
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole page."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": NUM_COLUMNS, "h": 1},
            }
        )
        top += 1
        for index, panel in enumerate(row):
            left = index * WIDTH
            place = {"x": left % NUM_COLUMNS, "y": top + left // NUM_COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **chart(panel)})
        top += -(-len(row) * WIDTH // NUM_COLUMNS) * HEIGHT
    return {
        "title": "Baton",
        "uid": "baton",
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def variables() -> list[dict[str, Any]]:
    """What is picked at the top of the page."""
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1},
        {
            "name": "job",
            "label": "Scrape job",
            "type": "query",
            "datasource": SOURCE,
            "definition": "label_values(baton:router_up, job)",
            "query": {"query": "label_values(baton:router_up, job)", "refId": "jobs"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def chart(panel: Panel) -> dict[str, Any]:
    """A time series panel."""
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.is_stacked else {"fillOpacity": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"lineWidth": 1, "showPoints": "never", **custom}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
