"""Rendering off the event loop: short conversations at once, long ones in a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.errors import QueueFullError
from router.text.chat_renderer import NUM_THREADS, SHORT_CHARACTERS, ChatRenderer
from router.text.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplateError
from router.text.template_bounds import Budget
from router.text.template_files import ChatTemplates

SHORT = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "x" * (SHORT_CHARACTERS + 1)}]


class HeldTemplate(ChatTemplate):
    """Says in which threads it rendered; long conversations wait until the test lets them go."""

    def __init__(self, source: str = "{{ messages[0].content }}") -> None:
        super().__init__(source, special_tokens={})
        self.threads: list[str] = []
        self.let_go = threading.Event()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> str:
        self.threads.append(threading.current_thread().name)
        if budget is None:
            assert self.let_go.wait(120)
        return super().render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, arguments=arguments, budget=budget
        )


@asynccontextmanager
async def renderer(template: ChatTemplate | None, *, wait_s: float = 60.0) -> AsyncIterator[ChatRenderer]:
    templates = None if template is None else ChatTemplates(default=template)
    made = ChatRenderer(templates, wait_s=wait_s, retry_after_s=1.0)
    try:
        yield made
    finally:
        if isinstance(template, HeldTemplate):
            template.let_go.set()
        await made.close()


async def rendered(made: ChatRenderer, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    return await made.render(messages, add_generation_prompt=True, is_open=False, arguments=arguments)


async def test_short_conversations_do_not_wait_for_long_ones() -> None:
    template = HeldTemplate()
    async with renderer(template) as made:
        slow = [asyncio.create_task(rendered(made, LONG)) for _ in range(NUM_THREADS + 3)]
        await asyncio.sleep(0)

        assert await rendered(made, SHORT) == "hello"
        assert not any(task.done() for task in slow)
        template.let_go.set()
        assert await asyncio.gather(*slow) == [LONG[0]["content"]] * len(slow)

    assert template.threads[-1].startswith("baton-chat")
    assert template.threads.count(threading.current_thread().name) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("baton-chat")]


async def test_few_values_that_make_much_work_are_rendered_in_a_thread() -> None:
    template = HeldTemplate("{% for a in range(number) %}x{% endfor %}")
    template.let_go.set()
    async with renderer(template) as made:
        assert await rendered(made, SHORT, number=5_000) == "x" * 5_000

    here, there = template.threads
    assert (here, there.startswith("baton-chat")) == (threading.current_thread().name, True)


async def test_few_values_that_make_too_much_are_refused() -> None:
    async with renderer(ChatTemplate("{{ 'x' * number }}", special_tokens={})) as made:
        with pytest.raises(ChatTemplateError, match="more than 8388608 characters"):
            await rendered(made, SHORT, number=10**12)


async def test_long_conversations_wait_for_a_thread_no_longer_than_allowed() -> None:
    template = HeldTemplate()
    async with renderer(template, wait_s=0.02) as made:
        slow = [asyncio.create_task(rendered(made, LONG)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)

        with pytest.raises(QueueFullError, match="2 long conversations") as caught:
            await rendered(made, LONG)

        assert caught.value.retry_after_s == 1.0
        template.let_go.set()
        await asyncio.gather(*slow)


async def test_thread_of_somebody_who_left_is_taken_until_it_is_done() -> None:
    template = HeldTemplate()
    async with renderer(template, wait_s=0.02) as made:
        gone = [asyncio.create_task(rendered(made, LONG)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

        with pytest.raises(QueueFullError):
            await rendered(made, LONG)
        template.let_go.set()
        while True:  # until the threads have noticed
            try:
                assert await rendered(made, LONG)
                break
            except QueueFullError:
                continue


async def test_final_message_can_be_left_open_in_a_thread() -> None:
    async with renderer(ChatTemplate("{{ messages[-1].content }}!", special_tokens={})) as made:
        text = await made.render(LONG, add_generation_prompt=True, is_open=True, arguments={})

    assert text == LONG[0]["content"]


async def test_model_without_a_template_says_so() -> None:
    async with renderer(None) as made:
        with pytest.raises(NoChatTemplateError):
            await rendered(made, SHORT)
