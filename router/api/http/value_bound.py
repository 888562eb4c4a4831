"""The bound on JSON values, so that parsing for one request delays the others only for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.api.http.json_size import JsonSize, exact_size, rough_size
from router.errors import TooManyValuesError

_OBJECT_WEIGHT = 24
_ARRAY_WEIGHT = 2
"""Weights of containers, because validating a number takes 0.2 us, a list 0.5 us, a message of a chat 6 us."""


def weight(size: JsonSize) -> int:
    """The cost of validating a JSON text, in units of one number in a list."""
    return size.num_values + _OBJECT_WEIGHT * size.num_objects + _ARRAY_WEIGHT * size.num_arrays


async def check_num_values(texts: Sequence[bytes], *, max_body_values: int, subject: str = "the body has") -> None:
    """Refuse JSON texts that have too many values in sum, before any is parsed.

    Args:
        texts: The texts to be parsed.
        max_body_values: As ``RouterSettings`` has it.
        subject: How a refusal begins.

    Raises:
        TooManyValuesError: Parsing them would delay all other requests.
    """
    if sum(weight(rough_size(text)) for text in texts) <= max_body_values:
        return
    sizes = await asyncio.to_thread(lambda: [exact_size(text) for text in texts])
    if sum(map(weight, sizes)) > max_body_values:
        raise TooManyValuesError(
            subject=subject,
            num_values=sum(size.num_values for size in sizes),
            num_objects=sum(size.num_objects for size in sizes),
            max_body_values=max_body_values,
        )
