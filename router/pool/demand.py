"""What one request asks of the replicas, as far as the choice among them is concerned."""

from __future__ import annotations

from engine.contract.block_hash import prompt_keys
from engine.contract.messages import GenerateRequest


class Demand:
    """A prompt, its session, and the keys of its blocks, which are computed once and only if somebody asks."""

    __slots__ = ("_keys", "_request", "session_id")

    def __init__(self, request: GenerateRequest, *, session_id: str | None = None) -> None:
        self._request = request
        self._keys: tuple[int, ...] | None = None
        self.session_id = session_id

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return len(self._request.prompt_token_ids)

    def block_keys(self, block_size: int) -> tuple[int, ...]:
        """The keys of the prompt's blocks that a prefix cache can supply: its last token is always computed."""
        if self._keys is None:
            tokens = self._request.prompt_token_ids.array[:-1]
            self._keys = prompt_keys(tokens, self._request.cache_salt, block_size)
        return self._keys
