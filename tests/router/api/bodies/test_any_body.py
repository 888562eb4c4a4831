"""Any body at all: the answer is a result or a refusal in OpenAI's shape, never a 5xx and never a hang."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import GenerateBody
from tests.support.router.router_rig import RouterRig, router_rig

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
PLAUSIBLE = st.sampled_from([0, 1, 2, -1, 0.5, 1.5, True, "a", ["a"], [5], [[5, 6]], {}, {"include_usage": True}, None])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=9) | JSON_VALUES}
    ),
    min_size=1,
    max_size=3,
)


def bodies(model: type[GenerateBody], required: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = [name for name in (*model.model_fields, *model.neutral_values) if name not in ("model", *required)]
    extras = st.dictionaries(st.sampled_from(names), PLAUSIBLE | JSON_VALUES, max_size=4)
    return st.builds(lambda needed, more: {**more, **needed}, st.fixed_dictionaries(required), extras)


CASES = {
    "/v1/chat/completions": bodies(ChatBody, {"messages": MESSAGES}),
    "/v1/completions": bodies(
        CompletionBody, {"prompt": st.text(max_size=9) | st.lists(st.integers(-2, 500), max_size=4) | JSON_VALUES}
    ),
}


async def post(rig: RouterRig, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with asyncio.timeout(60):
        response = await rig.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    return response.status_code, response.text


@pytest.mark.parametrize("path", CASES)
def test_any_body_is_answered_or_refused(model_dir: Path, path: str) -> None:
    with asyncio.Runner() as runner:
        context = router_rig(model_dir, max_model_len=64)
        rig = runner.run(context.__aenter__())

        @settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(body=CASES[path])
        def check(body: dict[str, Any]) -> None:
            status, text = runner.run(post(rig, path, body))
            assert status in (200, 400), text
            if status == 400:
                assert json.loads(text)["error"]["message"]

        try:
            check()
            assert rig.service.counters.num_failed == 0
            assert rig.service.counters.num_finished > 10
        finally:
            runner.run(context.__aexit__(None, None, None))
