"""The arguments of a call in an unstreamed message: as the model wrote them, even if Python cannot read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import scripted
from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import write_model_dir

TEMPLATE = "{% for tool in tools %}<tool_call>{{ tool | tojson }}{% endfor %}{{ messages[0].content }}"
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {}}}}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"x": 1e999}', {"x": "1e999"}),
        (f'{{"x": {"7" * 5000}}}', {"x": "7" * 5000}),
        (f'{{"x": {"[" * 5000}{"]" * 5000}}}', {}),
        (f'{{"x": {"[" * 5000}', {}),
        ('{"x": NaN}', {}),
    ],
    ids=["more than a float", "many digits", "deep", "deep, unfinished", "no JSON"],
)
async def test_arguments_are_json_as_the_model_wrote_them(tmp_path: Path, written: str, told: Any) -> None:
    model_dir = write_model_dir(tmp_path / "model", config={"chat_template": TEMPLATE})
    tokenizer = Tokenizer.load(model_dir)
    call = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    script = [*tokenizer.encode(call), *tokenizer.encode("<|end|>")]
    async with router_rig(model_dir, next_token=scripted(script), max_model_len=32_768) as rig:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "max_tokens": len(script)}
        answer = await rig.client.post("/v1/messages", json=body)

    assert answer.status_code == 200
    [block] = answer.json(parse_constant=_refuse, parse_int=str, parse_float=str)["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", told)


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"the answer has {name}, which is no JSON")
