"""The conversation that a response continues: what is stored of it, how much of it may be read, and its pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

from router.api.http.value_bound import check_num_values
from router.api.responses.body import ResponsesBody
from router.api.responses.items import ITEMS, InputItem, stored_item
from router.api.responses.to_chat import input_items
from router.errors import BodyTooLargeError, InvalidRequestError, ResponseNotFoundError
from router.service import RouterService


class Conversation:
    """The items before a response, and the items that its body adds."""

    def __init__(self, earlier: tuple[bytes, ...], new: Sequence[InputItem]) -> None:
        self._earlier, self._new = earlier, new

    def items(self) -> list[InputItem]:
        """All items."""
        return [*(item for segment in self._earlier for item in ITEMS.validate_json(segment)), *self._new]

    def stored(self, unique: str) -> tuple[bytes, ...]:
        """All items in the format of ``StoredResponse``; their ids are made from ``unique``."""
        listed = [stored_item(item, item_id=f"item_{unique}{index:02x}") for index, item in enumerate(self._new)]
        return (*self._earlier, json.dumps(listed).encode())


async def conversation_of(service: RouterService, body: ResponsesBody, *, owner: str) -> Conversation:
    """The conversation of a body, including the response that it continues, if any.

    Raises:
        InvalidRequestError: There is no such response, or it is still being generated.
        BodyTooLargeError: The earlier conversation is larger than a body may be.
        TooManyValuesError: It has, together with the body, more values than a body may have.
    """
    settings = service.settings
    earlier = await _earlier_items(service, body, owner=owner)
    if sum(map(len, earlier)) > settings.max_body_bytes:
        raise BodyTooLargeError(max_body_bytes=settings.max_body_bytes)
    conversation = Conversation(earlier, input_items(body))
    if earlier:
        await check_num_values(
            conversation.stored(""),
            max_body_values=settings.max_body_values,
            subject="the conversation so far and the body have",
        )
    return conversation


async def _earlier_items(service: RouterService, body: ResponsesBody, *, owner: str) -> tuple[bytes, ...]:
    previous = body.previous_response_id
    if previous is None:
        return ()
    try:
        found = await service.responses.read(previous, owner=owner)
    except ResponseNotFoundError as error:
        raise InvalidRequestError(
            error.message, code="previous_response_not_found", param="previous_response_id"
        ) from error
    if (found.status or json.loads(found.body)["status"]) == "in_progress":
        raise InvalidRequestError(
            f"the response {previous!r} is still being generated: wait until it ends",
            code="previous_response_in_progress",
            param="previous_response_id",
        )
    return found.items


async def page_of(
    segments: Sequence[bytes], *, after: str | None, limit: int, order: Literal["asc", "desc"]
) -> dict[str, Any]:
    """A page of the items, which are stored by turn. It reads only the turns that it needs, and yields between turns.

    Raises:
        InvalidRequestError: No item has the id ``after``.
    """
    step = -1 if order == "desc" else 1
    found: list[dict[str, Any]] = []
    is_begun = after is None
    for segment in segments[::step]:
        for item in json.loads(segment)[::step]:
            if is_begun:
                found.append(item)
            is_begun = is_begun or item["id"] == after
        if len(found) > limit:
            break
        await asyncio.sleep(0)
    if after is not None and not is_begun:
        raise InvalidRequestError(
            f"there is no item {after[:200]!r} in this response", code="invalid_parameter", param="after"
        )
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
