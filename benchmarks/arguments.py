"""Numbers on a benchmark's command line, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def count(text: str) -> int:
    """A whole number of at least 1, for ``type=`` of an argument."""
    return at_least(1)(text)


def at_least(minimum: int) -> Callable[[str], int]:
    """A whole number that is not below ``minimum``."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} must be at least {minimum}")
        return value

    return whole_number


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value
