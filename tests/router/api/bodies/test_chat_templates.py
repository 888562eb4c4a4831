"""What callers may give to the model's chat template, and what comes of too much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import write_model_dir

MANY = [{"role": "user", "content": "a b"} for _ in range(4000)]
HALF_A_MEGABYTE = "x" * 500_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ["eos_token", "bos_token", "raise_exception", "strftime_now", "tools", "pad_token"])
async def test_template_arguments_that_the_model_gives_are_refused_by_name(
    model_dir: Path, path: str, name: str
) -> None:
    async with router_rig(model_dir) as rig:
        answer = await rig.client.post(
            path, json={"messages": MANY, "chat_template_kwargs": {name: HALF_A_MEGABYTE, "enable_thinking": False}}
        )

        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs")
        assert error["message"].startswith(f"chat_template_kwargs must not contain {name}:")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_value_that_the_template_repeats_without_end_is_refused(tmp_path: Path, path: str) -> None:
    template = "{% for m in messages %}{{ hint }}{{ m.content }}{% endfor %}"
    async with router_rig(write_model_dir(tmp_path / "model", config={"chat_template": template})) as rig:
        body: dict[str, Any] = {"messages": MANY, "chat_template_kwargs": {"hint": HALF_A_MEGABYTE}}
        asked = asyncio.create_task(rig.client.post(path, json=body))
        while not asked.done():
            assert (await rig.client.get("/health")).status_code == 200
            await asyncio.sleep(0)
        answer = await asked

        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "chat_template")
        assert "more than 8388608 characters" in error["message"]
        assert (await rig.chat(max_tokens=2)).status_code == 200


LOOPS = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] }};{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKS = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }};{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
INDEXES = "{% for m in messages %}[{{ m.role }}]{{ m['content'][0]['text'] }};{% endfor %}[assistant]"
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }};{% else %}parts{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = [{"type": "text", "text": "is this"}, {"type": "text", "text": "safe?"}]


@pytest.mark.parametrize(
    ("template", "of_parts"),
    [(LOOPS, "is this;safe?;"), (ASKS, "is this;safe?;"), (INDEXES, "is this;"), (EITHER, "is this\nsafe?;")],
)
async def test_a_content_comes_in_the_form_that_the_template_reads(
    tmp_path: Path, template: str, of_parts: str
) -> None:
    """A template that loops over parts, as Llama Guard's, finds no text in a string, and raises nothing."""
    directory = write_model_dir(tmp_path / "model", config={"chat_template": template})
    async with router_rig(directory) as rig:
        seen = [
            rig.service.tokenizer.decode(
                (
                    await rig.client.post(
                        "/tokenize", json={"messages": [{"role": "user", "content": content}], **more}
                    )
                ).json()["tokens"]
            )
            for content, more in (
                ("hello", {}),
                (PARTS, {}),
                ("hello", {"continue_final_message": True, "add_generation_prompt": False}),
            )
        ]

    assert seen == ["[user]hello;[assistant]", f"[user]{of_parts}[assistant]", "[user]hello"]
