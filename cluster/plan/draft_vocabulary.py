"""Whether a draft model means the same by its tokens as the model that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from router.text.tokenizer import Tokenizer

MAX_NAMED: Final = 3


def tells_tokens(path: Path) -> bool:
    """True where a model directory says what its tokens are."""
    return (path / "tokenizer.json").is_file()


def first_differences(main: Path, draft: Path) -> str:
    """The first ids that are another token in each directory, in words; empty where there are none.

    Tokens that only one of them has, such as one that was added for chats, make no difference.

    Raises:
        ModelDirectoryError: A tokenizer.json cannot be used.
    """
    differing = list(_differing(_tokens(main), _tokens(draft)))
    named = [
        f"{token_id} is {one!r} in the model and {other!r} in the draft model" for token_id, one, other in differing
    ]
    more = f", and {len(named) - MAX_NAMED:,} more" if len(named) > MAX_NAMED else ""
    return "; ".join(named[:MAX_NAMED]) + more


def _differing(main: dict[int, str], draft: dict[int, str]) -> Iterator[tuple[int, str, str]]:
    for token_id in sorted(main.keys() & draft.keys()):
        if main[token_id] != draft[token_id]:
            yield token_id, main[token_id], draft[token_id]


def _tokens(path: Path) -> dict[int, str]:
    """Every token of a vocabulary by its id, added and special ones included."""
    vocabulary = Tokenizer.load(path).backend.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
