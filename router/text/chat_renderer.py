"""Renders conversations without blocking the event loop: short ones at once, all others in threads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from router.errors import QueueFullError
from router.text.chat_template import NoChatTemplateError
from router.text.template_bounds import TemplateLimitError
from router.text.template_files import ChatTemplates

NUM_THREADS = 2
"""Number of threads. They share the GIL with the event loop, so more threads would only switch more often."""

SHORT_STEPS = 2_000
"""Steps that a rendering may take on the event loop: a millisecond or two. Past that it restarts in a thread."""

SHORT_CHARACTERS = 4_000
SHORT_VALUES = 400


class ChatRenderer:
    """The templates of a model, if it has any, and the threads that render with them.

    Short conversations never wait for long ones. A long one waits up to ``wait_s`` for a thread. A rendering keeps its
    thread until it ends, even if its caller has left; ``Budget`` bounds how long that takes.
    """

    def __init__(self, templates: ChatTemplates | None, *, wait_s: float, retry_after_s: float) -> None:
        self._templates = templates
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._free = asyncio.Semaphore(NUM_THREADS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="baton-chat")

    @property
    def templates(self) -> ChatTemplates | None:
        """The model's templates, if it has any."""
        return self._templates

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        is_open: bool,
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render the prompt for a conversation; with ``is_open`` the model continues its final message.

        Raises:
            InvalidRequestError: There is no template, or it refuses the conversation or its arguments.
            QueueFullError: The conversation is long, and no thread became free within ``wait_s``.
        """
        if self._templates is None:
            raise NoChatTemplateError
        template = self._templates.for_tools(tools)
        job: Callable[..., str]
        if is_open:
            job = functools.partial(template.render_open, messages, tools=tools, arguments=arguments)
        else:
            job = functools.partial(
                template.render,
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                arguments=arguments,
            )
        if _is_short([messages, arguments, tools]):
            try:
                return job(budget=template.budget(max_steps=SHORT_STEPS))
            except TemplateLimitError:
                pass  # few values can still mean much work: render in a thread
        return await self._in_thread(job)

    async def close(self) -> None:
        """Wait until all threads have finished."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _in_thread(self, job: Callable[..., str]) -> str:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise QueueFullError(
                f"{NUM_THREADS} long conversations are being rendered, which is the limit; try again later",
                retry_after_s=self._retry_after_s,
            ) from None
        rendering = asyncio.get_running_loop().run_in_executor(self._threads, job)
        rendering.add_done_callback(self._on_rendered)
        return await asyncio.shield(rendering)

    def _on_rendered(self, rendering: asyncio.Future[str]) -> None:
        self._free.release()
        if not rendering.cancelled():
            rendering.exception()  # marks it as retrieved: the caller may have left


def _is_short(value: Any) -> bool:
    """True if there are few values with little text."""
    waiting, num_values, num_characters = [value], 1, 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            num_characters += len(item)
        elif isinstance(item, (Mapping, list, tuple)):
            num_values += len(item)
            if num_values > SHORT_VALUES:
                return False
            waiting += [*item, *item.values()] if isinstance(item, Mapping) else item
    return num_characters <= SHORT_CHARACTERS
