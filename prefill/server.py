"""The prefill worker: computes prompts, samples first tokens, and keeps the blocks until a decode worker read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from engine.contract.errors import RequestRefusedError
from engine.contract.messages import GenerateRequest
from engine.frontend.server import EngineServer


class PrefillServer(EngineServer):
    """An engine whose requests end after their first token; their blocks stay leased if decoding goes on elsewhere."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[RequestRefusedError | None]:
        """Add prompts, whose first tokens go to the stream of their ``client_id``. One answer each, in order.

        Raises:
            EngineDeadError: The engine ended; nothing was added.
        """
        return await super().submit([dataclasses.replace(request, hand_over=True) for request in requests])
