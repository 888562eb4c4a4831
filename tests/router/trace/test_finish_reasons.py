"""A trace has the same finish reason as the answer, in the waterfall and at a collector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from router.telemetry.settings import TracingSettings
from router.telemetry.tracer import make_tracer
from tests.support.cluster.otlp_collector import running_collector
from tests.support.router.fake_workers import scripted
from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import EOS, byte_level_tokenizer, write_model_dir

TEMPLATE = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}<tool_call>"
CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "stop"}}]
CHATS = {"messages": [{"role": "user", "content": "Stop!"}], "tools": TOOLS}


def tokenizer() -> Tokenizer:
    made = byte_level_tokenizer()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<tool_call>", "</tool_call>")])
    return made


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (CALL, {}, "tool_calls"),
        ("So be it.", {}, "stop"),
        (CALL, {"max_tokens": 12}, "length"),
        (f"Well then. {CALL}", {"stop": ["then"]}, "stop"),
    ],
    ids=["calls", "text", "cut", "stop string"],
)
async def test_trace_and_spans_end_as_the_answer_does(
    tmp_path: Path, text: str, fields: dict[str, Any], reason: str, streams: bool
) -> None:
    path = write_model_dir(tmp_path / "model", tokenizer=tokenizer(), config={"chat_template": TEMPLATE})
    script = scripted(tokenizer().encode(text + EOS, add_special_tokens=False).ids)
    body = {**CHATS, "max_tokens": 100, "stream": streams, **fields}
    with running_collector() as collector:
        tracer = make_tracer(TracingSettings(otlp_endpoint=collector.url), role="router", instance_id="r")
        async with router_rig(path, next_token=script, tracer=tracer) as rig:
            answer = await rig.client.post("/v1/chat/completions", json=body)
            told = await rig.client.get(f"/v1/requests/{answer.headers['x-request-id']}/trace")

    said = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choice = (said[-1] if streams else answer.json())["choices"][0]
    assert (choice["finish_reason"], told.json()["finish_reason"]) == (reason, reason)
    [whole] = [span for span in collector.spans if span.name == "llm_request"]
    assert whole.attributes["gen_ai.response.finish_reasons"] == [reason]
    assert (whole.attributes["baton.state"], whole.error) == ("finished", None)
