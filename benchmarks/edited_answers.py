"""Answers as they were before somebody edited them: what callers of code edits can predict."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.random_llama import VOCAB_SIZE

EDIT_EVERY = 24


def before_edits(answer: Sequence[int]) -> list[int]:
    """The answer with one of three edits undone every so many tokens, in turn: a token that was changed, one that was
    put in, one that was left out."""
    tokens = list(answer)
    for place in range(len(answer) - EDIT_EVERY, 0, -EDIT_EVERY):
        other = (tokens[place] + 1) % VOCAB_SIZE
        match place // EDIT_EVERY % 3:
            case 0:
                tokens[place] = other
            case 1:
                del tokens[place]
            case _:
                tokens.insert(place, other)
    return tokens
