"""The answer of POST /tokenize: up to millions of numbers, written in pieces so that other requests get their turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.responses import StreamingResponse

from router.text.tokenizer import Tokenizer

_PIECE = 20_000
"""Ids written in one piece; each takes about 0.3 us, a string of the vocabulary 0.5 us."""


def tokens_response(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    with_strings: bool,
    headers: Mapping[str, str],
) -> StreamingResponse:
    """``{"count", "max_model_len", "tokens", "token_strs"}``."""

    async def write() -> AsyncIterator[str]:
        yield f'{{"count":{len(ids)},"max_model_len":{max_model_len},"tokens":['
        async for piece in _pieces(ids):
            yield piece
        yield '],"token_strs":'
        if not with_strings:
            yield "null}"
            return
        yield "["
        async for piece in _pieces(ids, tokenizer):
            yield piece
        yield "]}"

    return StreamingResponse(write(), media_type="application/json", headers=headers)


async def _pieces(ids: Sequence[int], tokenizer: Tokenizer | None = None) -> AsyncIterator[str]:
    for start in range(0, len(ids), _PIECE):
        part = ids[start : start + _PIECE]
        items = part if tokenizer is None else tokenizer.token_strings(part)
        yield ("," if start else "") + json.dumps(items, separators=(",", ":"))[1:-1]
        await asyncio.sleep(0)
