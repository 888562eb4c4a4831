"""The response header that names parameters without effect, so that nothing is ignored silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import quote

from router.api.bodies.chat_body import ChatBody
from router.api.bodies.strict_body import StrictBody
from router.api.bodies.tokenize_body import TokenizeBody
from router.text.template_files import ChatTemplates

HEADER = "X-Baton-Ignored"
MAX_NUM_NAMES = 32
MAX_NAME_CHARACTERS = 64


def ignored_header(body: StrictBody, templates: ChatTemplates | None) -> dict[str, str]:
    """The header; empty if everything has an effect. A conversation must have been rendered before."""
    return names_header(ignored_names(body, templates))


def names_header(ignored: Iterable[str]) -> dict[str, str]:
    """The header with these names; empty if there are none."""
    names = sorted(set(ignored))
    if not names:
        return {}
    told = [_as_header(name) for name in names[:MAX_NUM_NAMES]]
    if len(names) > MAX_NUM_NAMES:
        told.append(f"{len(names) - MAX_NUM_NAMES} more")
    return {HEADER: ", ".join(told)}


def ignored_names(body: StrictBody, templates: ChatTemplates | None) -> Iterator[str]:
    """The parameters of a body without effect; those inside lists are named without their place."""
    yield from body.ignored()
    if not isinstance(body, ChatBody | TokenizeBody):
        return
    for message in body.messages or ():
        yield from (f"messages.{name}" for name in (*message.ignored(), *message.unread(body.read_fields)))
    if body.messages is None or templates is None:
        return
    template = templates.for_tools(body.template_tools())
    yield from (name for name in body.template_parameters() if not template.reads(name))
    arguments = body.chat_template_kwargs or {}
    yield from (f"chat_template_kwargs.{name}" for name in arguments if not template.reads(name))


def _as_header(name: str) -> str:
    """A name, percent-encoded where a header requires it, and truncated if it is long."""
    encoded = quote(name, safe="")
    return encoded if len(encoded) <= MAX_NAME_CHARACTERS else f"{encoded[:MAX_NAME_CHARACTERS]}..."
