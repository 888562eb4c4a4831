"""`baton top`: what it reads, and that it fits a terminal."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster.client import ClusterGoneError, NotBatonError, explain
from cluster.commands.clients.top import BAR_CELLS, RECONNECT_TIMEOUT_S, bar, follow, screen, top, watch
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import router_rig, until
from tests.support.router.router_tokenizer import write_model_dir

KV = {"total": 100, "running": 50, "leased": 10, "loading": 0, "early": 0, "cached": 20, "free": 20}
QUEUE = {"running": 12, "decoding": 12, "waiting": 3, "loading": 2, "prompt_tokens": 0}


def worker(role: str, *, leaning: str | None = None, state: str = "running") -> dict[str, Any]:
    rates = {"tokens_per_s": 1234.5, "prompt_tokens_per_s": 99_000.0}
    return {"role": role, "leaning": leaning or role, "state": state, "kv": KV, "queue": QUEUE, **rates}


def a_state() -> dict[str, Any]:
    return {
        "model": "tiny",
        "workers": {
            "prefill-5f3a9c1d0b": worker("prefill", leaning="decode"),
            "decode-5f3a9c1d0b": worker("decode", state="left_out"),
        },
        "wanted": {"prefill": 1, "decode": 2},
        "routers": {"r": {"in_progress": 15, "waiting": 3}},
        "totals": {"tokens_per_s": 1234.5, "prompt_tokens_per_s": 99_000.0, "failed": 0},
    }


def lines_of(*events: tuple[str, object]) -> Iterator[str]:
    for name, data in events:
        yield from (f"event: {name}", f"data: {json.dumps(data)}", "")


ENTRY = {"number": 1, "at_unix_s": 1.0, "kind": "drain", "text": "decode worker drains", "replica": "d"}


def test_state_follows_the_stream() -> None:
    patch = {"workers": {"decode-5f3a9c1d0b": None}, "model": "other"}
    events = (
        ("snapshot", {"number": 1, "state": a_state(), "timeline": []}),
        ("delta", {"number": 2, "patch": patch}),
        ("event", ENTRY),
    )

    seen = list(follow(lines_of(*events)))

    assert len(seen) == 3
    assert (seen[-1].state["model"], list(seen[-1].state["workers"])) == ("other", ["prefill-5f3a9c1d0b"])
    assert [entry["text"] for entry in seen[-1].timeline] == [ENTRY["text"]]


def test_another_stream_is_refused() -> None:
    with pytest.raises(NotBatonError, match="cannot be read"):
        list(follow(["event: snapshot", "data: {}"]))
    with pytest.raises(httpx.HTTPError):
        list(follow(["data: no json"]))


def test_screen_fits_80_columns() -> None:
    (seen,) = follow(lines_of(("snapshot", {"number": 1, "state": a_state(), "timeline": [ENTRY] * 3})))
    console = Console(file=io.StringIO(), width=80)

    console.print(screen(seen, width=80, max_entries=2))

    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(word in text for word in ("pre→decode", "left out", "12", "100,23", "tiny", "1/3"))
    assert text.count("decode worker drains") == 2


def test_worker_that_keeps_to_one_kind_of_work_says_so() -> None:
    state = a_state()
    next(iter(state["workers"].values()))["keeps_to"] = "stream"
    (seen,) = follow(lines_of(("snapshot", {"number": 1, "state": state, "timeline": []})))
    console = Console(file=io.StringIO(), width=80)

    console.print(screen(seen, width=80, max_entries=2))

    assert "pre:streams" in console.file.getvalue()  # type: ignore[attr-defined]


def test_bar_is_as_long_as_it_should_be() -> None:
    full = {"total": 100, "running": 98, "leased": 1, "loading": 1, "early": 0, "cached": 0, "free": 0}

    assert len(bar(KV)) == len(bar(full)) == len(bar(dict.fromkeys(full, 0))) == BAR_CELLS


async def test_cluster_is_printed_once_where_nobody_looks(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    async with router_rig(write_model_dir(tmp_path), num_decode=2) as rig, live_app(rig.app) as url:
        await asyncio.to_thread(top, url, console)
        await until(lambda: not rig.service.live.num_watchers)

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in ("prefill-0", "decode-0", "decode-1", "tiny"))


class BrokenRouter(httpx.BaseTransport):
    """Tells the cluster's state once for each of the answers that it has, and is gone behind them."""

    def __init__(self, *models: str | None) -> None:
        self._models = list(models)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """A stream that ends after one event, or no server."""
        model = self._models.pop(0) if self._models else None
        if model is None:
            raise httpx.ConnectError("refused", request=request)
        snapshot = {"number": 1, "state": {**a_state(), "model": model}, "timeline": []}
        return httpx.Response(200, text="\n".join(lines_of(("snapshot", snapshot))) + "\n")


def test_stream_that_breaks_is_asked_for_again() -> None:
    with httpx.Client(transport=BrokenRouter("first", None, "second"), base_url="http://x") as client:
        views = watch(client, pause=lambda _: None, clock=lambda: 0.0)

        models = [next(views).state["model"] for _ in range(4)]

    assert models == ["first", "first", "first", "second"]


def test_cluster_that_does_not_come_back_is_said_to_have_ended() -> None:
    now_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    client = httpx.Client(transport=BrokenRouter("first"), base_url="http://x")
    with client, pytest.raises(ClusterGoneError) as caught:
        list(watch(client, pause=pause, clock=lambda: now_s))

    assert now_s == RECONNECT_TIMEOUT_S
    assert explain(caught.value, "http://x") == "the cluster at http://x or its router stopped"


def test_cluster_that_never_answered_is_told_at_once() -> None:
    with httpx.Client(transport=BrokenRouter(), base_url="http://x") as client, pytest.raises(httpx.ConnectError):
        next(watch(client))
