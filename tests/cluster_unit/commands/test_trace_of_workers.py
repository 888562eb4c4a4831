"""What `baton trace` prints of what workers tell."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from cluster.commands.clients.trace import print_waterfall


def span(name: str, parent: int | None, where: str, **attributes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "start_ms": 0.0,
        "duration_ms": 2.0,
        "parent": parent,
        "where": where,
        "attributes": attributes,
    }


def test_steps_and_what_was_moved_stand_in_their_part() -> None:
    waterfall = {
        "id": "a",
        "state": "finished",
        "endpoint": "/v1/completions",
        "prompt_tokens": 40,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "total_ms": 4.0,
        "ttft_ms": 2.0,
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "spans": [
            span("prefill", None, "p1"),
            span("transfer", None, "d1"),
            span("step", 0, "p1", tokens=32),
            span("kv_transfer", 1, "d1", bytes=3 * 2**20, blocks=5, source="p1"),
            span("step", 0, "p1", tokens=8, steps=2),
            span("step", 1, "d1", tokens=1),
            span("kv_transfer", 1, "d1", bytes=2**19, blocks=1, source=None),
        ],
        "choices": [],
        "gaps": {"count": 0},
        "other_choices": [],
    }
    console = Console(file=io.StringIO(), width=120)

    print_waterfall(waterfall, console)

    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1] == "trace 0af7651916cd43dd8448eb211c80319c"
    ends = [line.split("·")[-1].split("█")[-1].strip() for line in lines[2:9]]
    assert ends == [
        "p1",
        "p1  32 tokens",
        "p1  8 tokens in 2 steps",
        "d1",
        "d1  3.0 MiB, 5 blocks from p1",
        "d1  1 token",
        "d1  0.5 MiB, 1 block",
    ]
