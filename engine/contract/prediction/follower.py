"""Follows an answer along the text that its caller predicted. Free of torch.

Workers use it to draft tokens, and routers to count the predicted tokens that came true. So usage is the same wherever
an answer was made, and however many steps it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.contract.token_ids import TokenIds

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

MAX_TAIL: Final = 8
"""How many of the last tokens are looked for, at most, once an answer has left the prediction."""

NEAR: Final = 8
"""Within this many tokens after the place where the answer left the prediction, one matching token is enough."""

LEAST_MATCH: Final = 3
"""How many matching tokens are needed anywhere else: fewer occur everywhere."""


class PredictionFollower:
    """Follows one answer along its prediction, token by token.

    When the answer says something else, it has left the prediction. From then on, its last tokens are looked for in it.
    Near the place where it left, one token is enough, so that a replaced token or a few missing ones cost little.
    Everywhere else, the longest match of at least ``LEAST_MATCH`` tokens counts.

    num_tokens: tokens of the answer so far.
    num_followed: how many tokens in a row, up to the last one, were as predicted.
    num_accepted: how many tokens of the prediction the answer contained.
    """

    def __init__(self, token_ids: TokenIds) -> None:
        self._predicted = token_ids.array
        self._came_true = bytearray(len(token_ids))
        self._tail: list[int] = []
        self._place = 0
        self._is_lost = False
        self.num_tokens = 0
        self.num_followed = 0
        self.num_accepted = 0

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that the answer has not contained so far."""
        return len(self._came_true) - self.num_accepted

    def expected(self, max_tokens: int) -> IntArray:
        """At most ``max_tokens`` predicted next tokens; none while the answer is off the prediction."""
        return self._predicted[self._place : self._place + max_tokens] if not self._is_lost else self._predicted[:0]

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in the answer's next tokens."""
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            self._tail = [*self._tail[1 - MAX_TAIL :], token_id]
            if not self._is_lost and self._place < self._predicted.size and self._predicted[self._place] == token_id:
                self._accept(self._place)
            else:
                self._look_for(token_id)

    def _accept(self, index: int) -> None:
        """The answer contains this token of the prediction; go on after it."""
        self.num_accepted += not self._came_true[index]
        self._came_true[index] = 1
        self._place = index + 1
        self.num_followed += 1

    def _look_for(self, token_id: int) -> None:
        """Find the answer's last tokens in the prediction, and go on from there if they are found."""
        self.num_followed = 0
        found = self._find(np.flatnonzero(self._predicted == token_id))
        self._is_lost = found is None
        if found is not None:
            self._accept(found)

    def _find(self, places: LongArray) -> int | None:
        """The best match among the places of the answer's last token."""
        near = places[(places >= self._place) & (places < self._place + NEAR)]
        length = min(places.size, 1)
        while 0 < length < len(self._tail):
            longer = places[places >= length]
            longer = longer[self._predicted[longer - length] == self._tail[-1 - length]]
            if longer.size == 0:
                break
            places, length = longer, length + 1
        if length >= LEAST_MATCH:
            ahead = places[places >= self._place]
            return int(ahead[0]) if ahead.size else int(places[-1])
        return int(near[0]) if near.size else None
