"""`baton trace`: where a request's time went, as a waterfall in the terminal, or the last requests as a table."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.client import answer_of, bearer, shown

TIMEOUT_S = 15.0
BAR_WIDTH = 24
NUM_LISTED = 20
FULL, EMPTY = "█", "·"


def trace(url: str, request_id: str, console: Console, *, as_json: bool, api_key: str = "") -> None:
    """Print one request's waterfall; without an id, the last requests.

    Raises:
        httpx.HTTPError: The cluster does not answer, or has no trace of this request that the key opens.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False) as client:
        if request_id:
            response = client.get(f"/v1/requests/{quote(request_id, safe='')}/trace")
            answer = answer_of(response, "spans", "choices", "gaps")
        else:
            answer = answer_of(client.get("/v1/requests", params={"limit": NUM_LISTED}), "data")
    if as_json:
        console.print_json(json.dumps(answer), ensure_ascii=True)
    elif request_id:
        print_waterfall(shown(answer), console)
    else:
        console.print(requests_table(shown(answer["data"])))


def print_waterfall(answer: dict[str, Any], console: Console) -> None:
    """Print one line per part with its place in the whole; then the choice and its reason, and gaps between tokens."""
    tokens = f"{answer['prompt_tokens']} + {answer['completion_tokens']} tokens, {answer['cached_tokens']} cached"
    head = f"{answer['id']}  {answer['state']}  {answer['endpoint']}  {tokens}"
    console.print(Text(head), soft_wrap=True)
    if answer.get("trace_id") is not None:
        console.print(Text(f"trace {answer['trace_id']}"), soft_wrap=True)
    _print_choice(answer, console, total_ms=answer["total_ms"])
    for other in answer["other_choices"]:
        console.print(Text(f"\nchoice {other['index'] + 1}  {other['state']}  {other['completion_tokens']} tokens"))
        _print_choice(other, console, total_ms=answer["total_ms"])


def _print_choice(answer: dict[str, Any], console: Console, *, total_ms: float) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=14)
    table.add_column(no_wrap=True, justify="right", min_width=10)
    table.add_column(no_wrap=True, width=BAR_WIDTH)
    table.add_column(overflow="fold")
    for span in in_order(answer["spans"]):
        name = span["name"] if span["parent"] is None else f"  {span['name']}"
        bar = bar_of(span["start_ms"], span["duration_ms"], total_ms=total_ms)
        table.add_row(Text(name), f"{span['duration_ms']:,.1f} ms", bar, Text(span["where"] + detail_of(span)))
    table.add_row(Text("total"), f"{answer['total_ms']:,.1f} ms", "", "")
    console.print(table)
    if answer.get("ttft_ms") is not None:
        console.print(Text(f"first token after {answer['ttft_ms']:,.1f} ms"), soft_wrap=True)
    for span in answer["spans"]:
        if trouble := trouble_of(span):
            console.print(Text(trouble), soft_wrap=True)
    for choice in answer["choices"]:
        console.print(Text(choice_line(choice)), soft_wrap=True)
    if (gaps := answer["gaps"])["count"]:
        console.print(
            Text(f"gaps: {gaps['count']}, p50 {gaps['p50_ms']} ms, p99 {gaps['p99_ms']} ms, max {gaps['max_ms']} ms"),
            soft_wrap=True,
        )


def in_order(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts by time, each followed by those inside of it."""
    inside: dict[int | None, list[tuple[int, dict[str, Any]]]] = {}
    for index, span in enumerate(spans):
        inside.setdefault(span["parent"], []).append((index, span))
    ordered: list[dict[str, Any]] = []
    for index, span in inside.get(None, []):
        ordered += [span, *(child for _, child in inside.get(index, []))]
    return ordered


def detail_of(span: dict[str, Any]) -> str:
    """What a worker's step computed, or how much KV was read from which worker."""
    told = span["attributes"]
    if span["name"] == "step":
        steps = f" in {told['steps']} steps" if "steps" in told else ""
        return f"  {_counted(told['tokens'], 'token')}{steps}"
    if span["name"] == "kv_transfer":
        source = "" if told["source"] is None else f" from {told['source']}"
        return f"  {told['bytes'] / 2**20:,.1f} MiB, {_counted(told['blocks'], 'block')}{source}"
    return ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def bar_of(start_ms: float, duration_ms: float, *, total_ms: float, width: int = BAR_WIDTH) -> str:
    """The place of a part in the whole as a bar; a part of no length is one character wide."""
    scale = width / total_ms if total_ms > 0 else 0.0
    begin = min(int(start_ms * scale), width - 1)
    end = min(max(round((start_ms + duration_ms) * scale), begin + 1), width)
    return EMPTY * begin + FULL * (end - begin) + EMPTY * (width - end)


def trouble_of(span: dict[str, Any]) -> str:
    """What went wrong in a part; empty if nothing did."""
    attributes = span["attributes"]
    if span["name"] == "refused":
        return f"refused with {attributes['status']} {attributes['code']}: {attributes['reason']}"
    reason = attributes.get("error") or (span["name"] in ("recovery", "recompute", "move") and attributes.get("reason"))
    return f"{span['name']}: {reason}" if reason else ""


def choice_line(choice: dict[str, Any]) -> str:
    """The choice, its reason and predictions, and the best alternative, as one line."""
    line = f"choice at {choice['at_ms']:,.1f} ms: {_plan(choice['chosen'])}, {choice['reason']}"
    if choice["predicted_ttft_ms"] is not None:
        line += f", first token predicted in {choice['predicted_ttft_ms']:,.1f} ms"
    others = [_plan(option) + _prediction(option) for option in choice["alternatives"]]
    return line + (f"; instead of {', '.join(others)}" if others else "")


def _plan(plan: dict[str, Any]) -> str:
    prefill, decode = plan["prefill"], plan["decode"]
    if prefill is None or prefill == decode:
        return str(decode)
    head = f" [{plan['head_tokens']} tokens of the prompt]" if "head_tokens" in plan else ""
    return str(prefill) if decode is None else f"{prefill}{head} > {decode}"


def _prediction(option: dict[str, Any]) -> str:
    ttft_ms = option["predicted_ttft_ms"]
    return "" if ttft_ms is None else f" ({ttft_ms:,.1f} ms)"


def requests_table(rows: list[dict[str, Any]]) -> Table:
    """A table of the last requests, newest first. Ids are not cut, so that they can be used to ask for a trace."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("id", overflow="fold")
    for title in ("state", "total ms", "first ms", "tokens"):
        table.add_column(title, no_wrap=True, justify="left" if title == "state" else "right")
    for row in rows:
        ttft = "" if row["ttft_ms"] is None else f"{row['ttft_ms']:,.1f}"
        tokens = f"{row['prompt_tokens']}+{row['completion_tokens']}"
        table.add_row(Text(row["id"]), row["state"], f"{row['total_ms']:,.1f}", ttft, tokens)
    return table
