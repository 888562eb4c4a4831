"""Earlier versions of answers, before an edit: what callers that edit code could give as a prediction."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.random_llama import VOCAB_SIZE

EDIT_EVERY = 24


def before_edits(answer: Sequence[int]) -> list[int]:
    """The answer, in which every so many tokens one of three edits is undone, in turn: a changed, an inserted or a
    removed token.
    """
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
