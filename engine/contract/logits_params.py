"""What requests give the logits processors: one class of parameters for each processor, and ``LogitsParams``, which
has those of all.

The names are those of OpenAI's and vLLM's APIs. Free of torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from engine.contract.request_fields import Vocabulary, request_field

MAX_NUM_BIASES = 1024
MAX_NUM_BAD_WORDS = 1024
MAX_NUM_BAD_WORD_TOKENS = 64
MAX_NUM_BAD_WORDS_TOKENS = 8192
"""The most tokens of one word, and (this one) of all a request's words in both forms: every step compares them."""
MAX_NGRAM_SIZE = 64
"""Every step compares so many tokens at each place of a text that says one thing again and again."""
MAX_NUM_NAMED_KEYS = 5
MAX_NUM_NAMED_CHARACTERS = 40

TOKEN_ID_PATTERN = r"^(0|[1-9][0-9]{0,9})$"

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
BiasKey = Annotated[str, Field(pattern=TOKEN_ID_PATTERN)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
BadWord = Annotated[str, Field(min_length=1, max_length=1000)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


def _with_token_keys(data: Any) -> Any:
    """At most ``MAX_NUM_BIASES`` biases, whose keys must be token ids; the error names those that are not."""
    if not isinstance(data, dict):
        return data
    if len(data) > MAX_NUM_BIASES:
        raise ValueError(f"an object has {len(data)} fields, the limit is {MAX_NUM_BIASES}")
    wrong = [key for key in data if not re.match(TOKEN_ID_PATTERN, str(key))]
    if wrong:
        named = ", ".join(repr(str(key)[:MAX_NUM_NAMED_CHARACTERS]) for key in wrong[:MAX_NUM_NAMED_KEYS])
        rest = f" and {len(wrong) - MAX_NUM_NAMED_KEYS} more" if len(wrong) > MAX_NUM_NAMED_KEYS else ""
        raise ValueError(f"keys must be token ids such as '50', got {named}{rest}")
    return data


async def _read_bias(given: dict[str, float], vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    bias = {int(token): value for token, value in given.items()}
    vocabulary.check(tuple(bias), param="logit_bias")
    return tuple(bias.items())


async def _read_allowed(given: list[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    vocabulary.check(given, param="allowed_token_ids")
    return tuple(dict.fromkeys(given))


async def _read_bad_words(given: list[str], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it appears at the beginning of a text and after a space.

    Line breaks and tabs belong to the word. A word of nothing but spaces is taken as it is. A word is left out if the
    model lacks one of its tokens: it cannot be sampled.
    """
    texts: dict[str, str] = {}
    for word in given:
        bare = word.lstrip(" ")
        for text in (word, bare, f" {bare}") if bare else (word,):
            texts.setdefault(text, word)
    rows = await vocabulary.encode(list(texts)) if texts else []
    words = dict.fromkeys(tuple(ids) for ids in rows if ids and vocabulary.has(ids))
    for word, ids in zip(texts.values(), rows, strict=True):
        if len(ids) > MAX_NUM_BAD_WORD_TOKENS:
            vocabulary.refuse(
                f"the word {word[:MAX_NUM_NAMED_CHARACTERS]!r} has {len(ids)} tokens, the limit is "
                f"{MAX_NUM_BAD_WORD_TOKENS}: give a shorter part of it",
                param="bad_words",
            )
    if (num_tokens := sum(map(len, words))) > MAX_NUM_BAD_WORDS_TOKENS:
        longest = max(given, key=len)[:MAX_NUM_NAMED_CHARACTERS]
        vocabulary.refuse(
            f"its {len(given)} words, with and without a space before them, have {num_tokens} tokens together, the "
            f"limit is {MAX_NUM_BAD_WORDS_TOKENS}: give fewer or shorter words, the longest is {longest!r}",
            param="bad_words",
        )
    return tuple(words)


@dataclass(frozen=True, kw_only=True)
class LogitBiasParams:
    """``logit_bias`` is added to the logits of token ids."""

    __slots__ = ()

    logit_bias: tuple[tuple[int, float], ...] = request_field(
        (), Annotated[dict[BiasKey, Bias], BeforeValidator(_with_token_keys)], read=_read_bias
    )


@dataclass(frozen=True, kw_only=True)
class PenaltyParams:
    """Makes tokens that a request holds already less likely; see the processor ``Penalties``."""

    __slots__ = ()

    presence_penalty: float = request_field(0.0, Penalty)
    frequency_penalty: float = request_field(0.0, Penalty)
    repetition_penalty: float = request_field(1.0, Annotated[float, Field(gt=0.0, le=100.0)], in_generation_config=True)

    @property
    def has_penalties(self) -> bool:
        """True when logits depend on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, kw_only=True)
class RepeatedNgramsParams:
    """No sequence of ``no_repeat_ngram_size`` tokens occurs twice in prompt and output together; 0: any may."""

    __slots__ = ()

    no_repeat_ngram_size: int = request_field(
        0, Annotated[int, Field(ge=0, le=MAX_NGRAM_SIZE)], in_generation_config=True
    )


@dataclass(frozen=True, kw_only=True)
class BadWordsParams:
    """``bad_words`` are sequences of token ids that the output must not contain."""

    __slots__ = ()

    bad_words: tuple[tuple[int, ...], ...] = request_field(
        (), Annotated[list[BadWord], Field(max_length=MAX_NUM_BAD_WORDS, fail_fast=True)], read=_read_bad_words
    )


@dataclass(frozen=True, kw_only=True)
class AllowedTokensParams:
    """Only ``allowed_token_ids`` may be sampled, if any are given."""

    __slots__ = ()

    allowed_token_ids: tuple[int, ...] | None = request_field(
        None, Annotated[list[TokenId], Field(min_length=1, fail_fast=True)], read=_read_allowed
    )


@dataclass(frozen=True, kw_only=True)
class LogitsParams(LogitBiasParams, PenaltyParams, RepeatedNgramsParams, BadWordsParams, AllowedTokensParams):
    """The parameters of all logits processors, a base of ``SamplingParams``: the class of a new one joins the bases."""

    __slots__ = ()
