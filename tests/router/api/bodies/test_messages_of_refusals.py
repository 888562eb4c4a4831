"""What a refusal says: the value and the remedy, and nothing of how it was checked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import RouterRig, router_rig


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as rig:
        yield rig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logit_bias": {"x": 1}},
            "the parameter 'logit_bias' is invalid: its keys must be token ids such as '50', got 'x'",
        ),
        (
            {"temperature": -1},
            "the parameter 'temperature' is invalid: Input should be greater than or equal to 0, got -1",
        ),
        ({"n": "two"}, "the parameter 'n' is invalid: Input should be a valid integer, got \"two\""),
    ],
)
async def test_message_has_the_value_and_nothing_of_how_it_was_checked(
    rig: RouterRig, fields: dict[str, Any], message: str
) -> None:
    response = await rig.complete("hi", **fields)

    assert response.json()["error"]["message"] == message
