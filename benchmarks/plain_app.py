"""A plain Ray Serve application, for comparison: an ingress, and a deployment that streams one item per token.

Serve and FastAPI read the annotations of endpoints in classes when the class is made: they must not be strings here.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

WORD = " and"


def _event(word: str) -> str:
    choice = {"index": 0, "text": word, "logprobs": None, "finish_reason": None}
    event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "plain", "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n"


def _end(num_tokens: int) -> str:
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


class PlainGenerator:
    """The second hop of a plain application: streams one item per token."""

    async def generate(self, num_tokens: int) -> AsyncIterator[str]:
        """Stream the tokens."""
        for _ in range(num_tokens):
            yield WORD


class Nothing:
    """A deployment that does nothing, in front of others."""

    def __init__(self, *others: DeploymentHandle[Any]) -> None:
        """Keep nothing."""


_two_hops = FastAPI()
_one_hop = FastAPI()


@serve.ingress(_two_hops)
class PlainTwoHops:
    """An ingress that writes what another deployment generates."""

    def __init__(self, generator: DeploymentHandle[Any]) -> None:
        self._generator = generator.options(method_name="generate", stream=True)

    @_two_hops.post("/v1/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        """Stream."""
        num_tokens = (await request.json())["max_tokens"]

        async def events() -> AsyncIterator[str]:
            async for word in self._generator.remote(num_tokens):
                yield _event(word)
            yield _end(num_tokens)

        return StreamingResponse(events(), media_type="text/event-stream")


@serve.ingress(_one_hop)
class PlainOneHop:
    """An ingress that generates the tokens itself."""

    @_one_hop.post("/v1/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        """Stream."""
        num_tokens = (await request.json())["max_tokens"]

        async def events() -> AsyncIterator[str]:
            for _ in range(num_tokens):
                yield _event(WORD)
            yield _end(num_tokens)

        return StreamingResponse(events(), media_type="text/event-stream")
