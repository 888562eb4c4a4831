"""Token ids of a prompt, packed once where the prompt enters. Free of torch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class TokenIds(Sequence[int]):
    """Token ids as little-endian int32 bytes, which are cheap to pickle, to hash, and to view as an array.

    An immutable sequence of integers, equal to any list or tuple of the same integers.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> TokenIds:
        """Pack integers; what is packed already is returned unchanged. Several times faster than numpy's conversion.

        Raises:
            struct.error: One does not fit into int32.
        """
        if isinstance(token_ids, TokenIds):
            return token_ids
        numbers = token_ids if isinstance(token_ids, (list, tuple)) else tuple(token_ids)
        return cls(struct.pack(f"<{len(numbers)}i", *numbers))

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The ids as a read-only array, without a copy."""
        return np.frombuffer(self.data, dtype="<i4")

    def tolist(self) -> list[int]:
        """The ids as a list of integers."""
        numbers: list[int] = self.array.tolist()
        return numbers

    def __len__(self) -> int:
        return len(self.data) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, slice):
            return TokenIds(self.array[index].tobytes())
        return int(self.array[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.data == other.data
        return self.tolist() == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.tolist()))

    def __repr__(self) -> str:
        return f"TokenIds.of({self.tolist()})"

    def __reduce__(self) -> tuple[type[TokenIds], tuple[bytes]]:
        return TokenIds, (self.data,)
