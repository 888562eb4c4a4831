"""A router that keeps no responses says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import FAST, router_rig


@pytest.mark.parametrize(
    ("max_stored", "sent", "store", "ignored"),
    [
        (0, {}, False, None),
        (0, {"store": True}, False, "store"),
        (0, {"store": False}, False, None),
        (5, {"store": True}, True, None),
        (5, {}, True, None),
    ],
)
async def test_response_says_whether_it_is_kept(
    model_dir: Path, max_stored: int, sent: dict[str, Any], store: bool, ignored: str | None
) -> None:
    settings = dataclasses.replace(FAST, max_stored_responses=max_stored)
    async with router_rig(model_dir, settings=settings) as rig:
        answer = await rig.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1, **sent})
        read = await rig.client.get(f"/v1/responses/{answer.json()['id']}")

    assert answer.json()["store"] is store
    assert (read.status_code == 200) is store
    assert answer.headers.get("x-baton-ignored") == ignored
