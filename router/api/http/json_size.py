"""Counts the values of a JSON text without parsing it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_QUOTE, _BACKSLASH, _COMMA, _BRACKET, _BRACE = b'"\\,[{'


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSize:
    """Counts of commas and opening brackets. There are at most ``num_commas`` + ``num_containers`` + 1 values."""

    num_commas: int
    num_arrays: int
    num_objects: int

    @property
    def num_values(self) -> int:
        """An upper bound on the values, including those in containers."""
        return self.num_commas + self.num_arrays + self.num_objects + 1

    @property
    def num_containers(self) -> int:
        """Arrays and objects."""
        return self.num_arrays + self.num_objects


def rough_size(text: bytes) -> JsonSize:
    """An upper bound, which also counts characters inside strings. 8 MB take some milliseconds at most."""
    return JsonSize(num_commas=text.count(b","), num_arrays=text.count(b"["), num_objects=text.count(b"{"))


def exact_size(text: bytes) -> JsonSize:
    """The counts without characters inside strings. numpy releases the GIL for it: call it in a thread."""
    characters = np.frombuffer(text, dtype=np.uint8)
    is_quote = characters == _QUOTE
    if _BACKSLASH in text:
        is_quote &= ~_is_escaped(characters)
    # True from an opening quote up to its closing one.
    is_inside = np.bitwise_xor.accumulate(is_quote)
    outside = characters[~is_inside]
    return JsonSize(
        num_commas=int(np.count_nonzero(outside == _COMMA)),
        num_arrays=int(np.count_nonzero(outside == _BRACKET)),
        num_objects=int(np.count_nonzero(outside == _BRACE)),
    )


def _is_escaped(characters: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """[num_characters] True for a character after an odd number of backslashes."""
    places = np.arange(characters.size, dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(characters == _BACKSLASH, np.int32(-1), places))
    # The length of the run of backslashes that ends at each position.
    run = places - last_other
    is_escaped = np.zeros(characters.size, dtype=np.bool_)
    is_escaped[1:] = (run[:-1] & 1).astype(np.bool_)
    return is_escaped
