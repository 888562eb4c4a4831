"""What clients send: synthetic loads of several mixes and shapes, and recorded ones."""

from __future__ import annotations

import json
import math
import random
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.token_ids import TokenIds

Shape = Literal["steady", "bursts", "step"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
TRACE_BLOCK_TOKENS = 512
MAX_HASH_ID = (1 << 30) - 1
"""The modulus for block ids, so that ids which are whole hashes can become tokens, too."""

BURST_PERIOD_S = 4.0
BURST_SHARE = 0.25
BURST_RATE = 3.0
"""The first quarter of each period has three times the mean rate, and the rest of the period the remaining requests."""


class LoadError(ValueError):
    """A load that cannot be made as requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request, and when its client sends it, in seconds after the start. ``promise``: the promises that it asks
    for; the others are the layout's. ``other_outputs``: the lengths of further choices of the same prompt.
    """

    at_s: float
    prompt: TokenIds
    num_output_tokens: int
    kind: str = ""
    promise: Promise = NO_PROMISE
    other_outputs: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Requests of one kind. Lengths are uniformly distributed from half to one and a half times the mean."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int

    def draw(self, at_s: float, source: random.Random, vocab_size: int) -> Arrival:
        """Draw a request. Its prompt shares no prefix with others."""
        num_prompt = max(2, round(self.num_prompt_tokens * source.uniform(0.5, 1.5)))
        num_output = max(2, round(self.num_output_tokens * source.uniform(0.5, 1.5)))
        tokens = np.frombuffer(source.randbytes(4 * num_prompt), dtype="<u4") % (vocab_size - 1) + 1
        return Arrival(
            at_s=at_s, prompt=TokenIds(tokens.astype("<i4").tobytes()), num_output_tokens=num_output, kind=self.name
        )


PROMPT_HEAVY = Mix(name="prompt_heavy", num_prompt_tokens=768, num_output_tokens=12)
BALANCED = Mix(name="balanced", num_prompt_tokens=256, num_output_tokens=48)
DECODE_HEAVY = Mix(name="decode_heavy", num_prompt_tokens=48, num_output_tokens=96)
MIXES: Mapping[str, Mix] = MappingProxyType({mix.name: mix for mix in (PROMPT_HEAVY, BALANCED, DECODE_HEAVY)})

STEPS_TO: Mapping[str, Mix] = MappingProxyType(
    {"prompt_heavy": DECODE_HEAVY, "balanced": PROMPT_HEAVY, "decode_heavy": PROMPT_HEAVY}
)
"""The mix that each mix of a step load changes to after half of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """A synthetic load. ``rates`` are requests per second for each mix, so that all mixes are equally heavy."""

    mix: str
    shape: Shape
    rates: Mapping[str, float]
    seconds: float
    seed: int = 0
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        if self.mix not in MIXES:
            raise LoadError(f"mix must be one of {', '.join(MIXES)}, got {self.mix!r}")
        if self.shape not in SHAPES:
            raise LoadError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        for name in {self.mix, STEPS_TO[self.mix].name} if self.shape == "step" else {self.mix}:
            if not 0.0 < self.rates.get(name, 0.0) < math.inf:
                raise LoadError(f"the rate of {name} must be above 0, got {self.rates.get(name)}")
        if not 0.0 < self.seconds < math.inf:
            raise LoadError(f"seconds must be above 0, got {self.seconds}")


def make_load(spec: LoadSpec) -> list[Arrival]:
    """The requests of a load, at random times with the mean rate of each moment."""
    source = random.Random(f"{spec.mix}/{spec.shape}/{spec.seed}")
    mix, half_s = MIXES[spec.mix], spec.seconds / 2
    if spec.shape == "steady":
        return list(_poisson(mix, spec, source, 0.0, spec.seconds))
    if spec.shape == "step":
        later = STEPS_TO[spec.mix]
        before = _poisson(mix, spec, source, 0.0, half_s)
        return [*before, *_poisson(later, spec, source, half_s, spec.seconds)]
    return list(_bursts(mix, spec, source))


def _bursts(mix: Mix, spec: LoadSpec, source: random.Random) -> Iterator[Arrival]:
    quiet_rate = (1 - BURST_RATE * BURST_SHARE) / (1 - BURST_SHARE)
    start_s = 0.0
    while start_s < spec.seconds:
        turn_s = min(start_s + BURST_SHARE * BURST_PERIOD_S, spec.seconds)
        end_s = min(start_s + BURST_PERIOD_S, spec.seconds)
        yield from _poisson(mix, spec, source, start_s, turn_s, BURST_RATE)
        yield from _poisson(mix, spec, source, turn_s, end_s, quiet_rate)
        start_s = end_s


def _poisson(
    mix: Mix, spec: LoadSpec, source: random.Random, start_s: float, end_s: float, factor: float = 1.0
) -> Iterator[Arrival]:
    rate = spec.rates[mix.name] * factor
    at_s = start_s + source.expovariate(rate)
    while at_s < end_s:
        yield mix.draw(at_s, source, spec.vocab_size)
        at_s += source.expovariate(rate)


def read_trace(file: Path, *, num_requests: int, speed: float = 1.0, scale: int = 1) -> list[Arrival]:
    """The first requests of a recorded load, which share prefixes as the recorded ones did.

    The file has one JSON object per line: timestamp (ms), input_length, output_length (tokens), hash_ids (one for each
    512 tokens of the prompt; equal ids, equal prefix). ``scale`` divides all lengths, ``speed`` all times.

    Raises:
        LoadError: The file is missing, or does not have this format.
    """
    if TRACE_BLOCK_TOKENS % scale:
        raise LoadError(f"scale must divide {TRACE_BLOCK_TOKENS}, got {scale}")
    arrivals: list[Arrival] = []
    try:
        with file.open() as lines:
            arrivals.extend(
                parse_trace_row(json.loads(line), speed=speed, scale=scale) for line in islice(lines, num_requests)
            )
    except OSError as error:
        raise LoadError(f"the trace {file} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{file}: line {len(arrivals) + 1} is not a valid request of a trace: {error!r}") from error
    return arrivals


def parse_trace_row(row: Mapping[str, object], *, speed: float = 1.0, scale: int = 1) -> Arrival:
    """One request of a recorded load.

    Raises:
        KeyError, TypeError, ValueError: The row does not have the format that ``read_trace`` describes.
    """
    hash_ids, timestamp = row["hash_ids"], row["timestamp"]
    if not isinstance(hash_ids, list) or not all(type(hash_id) is int for hash_id in hash_ids):
        raise TypeError("hash_ids must be a list of whole numbers")
    if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
        raise TypeError("timestamp must be a number, of milliseconds")
    if not 0.0 <= timestamp < math.inf:
        raise ValueError(f"timestamp must be 0 or more milliseconds, got {timestamp}")
    input_length, output_length = _length(row, "input_length"), _length(row, "output_length")
    if len(hash_ids) < max(1, input_length // TRACE_BLOCK_TOKENS):
        told = f"{len(hash_ids)}, one for each {TRACE_BLOCK_TOKENS} tokens of the prompt"
        raise ValueError(f"hash_ids has {told}, but input_length is {input_length}")
    ids = np.array([hash_id % MAX_HASH_ID for hash_id in hash_ids], dtype="<i4")
    blocks = np.repeat(ids + 1, TRACE_BLOCK_TOKENS // scale)
    num_prompt = min(scaled_length(input_length, scale), blocks.size)
    return Arrival(
        at_s=timestamp / 1e3 / speed,
        prompt=TokenIds(blocks[:num_prompt].tobytes()),
        num_output_tokens=scaled_length(output_length, scale),
        kind="trace",
    )


def scaled_length(length: int, scale: int) -> int:
    """A recorded length divided by ``scale``: at least 2 tokens, or as many as there were, but at least 1.

    An answer of one token needs no decode step and no hand-over, so it must not become one of two.
    """
    return max(1, min(length, max(2, length // scale)))


def _length(row: Mapping[str, object], name: str) -> int:
    length = row[name]
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ValueError(f"{name} must be a whole number of tokens, got {reprlib.repr(length)}")
    return length


def duration_s(arrivals: Sequence[Arrival]) -> float:
    """When the last request is sent."""
    return max((arrival.at_s for arrival in arrivals), default=0.0)
