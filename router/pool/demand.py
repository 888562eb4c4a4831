"""The properties of a request that the choice of a replica depends on."""

from __future__ import annotations

import zlib

from engine.contract.block_hash import prompt_keys
from engine.contract.messages import GenerateRequest
from engine.contract.promise import Promise


class Demand:
    """A prompt, its session, and its block keys, which are computed lazily and once.

    ``owner`` is the hash of the request's API key; empty where no key was needed.
    ``is_traced``: the alternatives of its placement should be recorded.
    """

    __slots__ = ("_keys", "_request", "is_traced", "owner", "session_id")

    def __init__(self, request: GenerateRequest, *, session_id: str | None = None, owner: str = "") -> None:
        self._request = request
        self.owner = owner
        self._keys: tuple[int, ...] | None = None
        self.session_id = session_id
        self.is_traced = False

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return len(self._request.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        """How many tokens it may generate."""
        return self._request.sampling.max_tokens

    @property
    def promise(self) -> Promise:
        """The request's promise."""
        return self._request.promise

    @property
    def may_be_split(self) -> bool:
        """True if two workers may each compute a part of the prompt: not for prompt log-probabilities or beams."""
        sampling = self._request.sampling
        return sampling.num_prompt_logprobs is None and sampling.beams is None

    @property
    def key(self) -> int:
        """A number that differs from request to request."""
        return zlib.crc32(self._request.request_id.encode())

    def block_keys(self, block_size: int) -> tuple[int, ...]:
        """Keys of the blocks that a prefix cache can supply; the prompt's last token is always computed."""
        if self._keys is None:
            tokens = self._request.prompt_token_ids.array[:-1]
            self._keys = prompt_keys(tokens, self._request.cache_salt, block_size)
        return self._keys
