"""Which examples are held out from training, decided by a hash of what makes an example new."""

import hashlib
from enum import Enum

HELD_OUT_SHARE = 10


class Split(Enum):
    """The two sides of the data; a held-out example never appears in training text."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def stable_hash(*parts: object) -> int:
    """A 32-bit number that depends only on the text of ``parts``: the same on every machine and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def split_of(task: str, *parts: object) -> Split:
    """The side on which the example of ``task`` named by ``parts`` lies: one in ten is held out."""
    return Split.HELD_OUT if stable_hash(task, *parts) % HELD_OUT_SHARE == 0 else Split.TRAIN
