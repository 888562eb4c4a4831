"""Sources of a question's requests: a described load, or a file of recorded arrivals in one of two formats."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from engine.contract.promise import MAX_PROMISE_MS, Promise
from engine.contract.token_ids import TokenIds
from simulation.loads import Arrival, LoadError, LoadSpec, make_load, parse_trace_row, scaled_length
from simulation.whatif.parts import Part, tokens_named
from simulation.whatif.recorded import RecordedSource

WARM_UP_S = 10.0
MAX_WARM_UP = 200
"""The most requests in a warm-up."""

MAX_DESCRIBED = 1_000_000
"""The most requests of a described load: all are made before the first one is simulated."""

WARM_UP_BIT = 1 << 30
"""A bit that is set in all tokens of a warm-up, and in no token of a load."""

MAX_LENGTH = 10_000_000
EXAMPLE = '{"t": 0.5, "prompt_tokens": 100, "output_tokens": 20}'
"""A line of a trace, for messages."""


class ArrivalRow(BaseModel):
    """One line of a file of plain arrivals. ``prefix_tokens`` first tokens of the prompt are those of all requests with
    the same ``prefix``; all of them where only ``prefix`` is given. ``ttft_ms`` and ``itl_ms``: what it asks to be
    promised.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    t: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Seconds after the start.")]
    prompt_tokens: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
    output_tokens: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
    prefix: str | None = None
    prefix_tokens: Annotated[int, Field(ge=0, le=MAX_LENGTH)] | None = None
    ttft_ms: Annotated[float, Field(gt=0, le=MAX_PROMISE_MS)] | None = None
    itl_ms: Annotated[float, Field(gt=0, le=MAX_PROMISE_MS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> ArrivalRow:
        if self.prefix is None and self.prefix_tokens is not None:
            raise ValueError("prefix_tokens needs prefix, the name of the prefix that requests share")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """The arrivals of a file that are sent within ``seconds`` after ``start_s``, ``speed`` times as fast, their lengths
    divided by ``scale``.
    """

    file: Path
    start_s: float = 0.0
    seconds: float = math.inf
    speed: float = 1.0
    scale: int = 1

    def load(self) -> list[Arrival]:
        """The arrivals in the order of their times. The start of the part becomes time 0.

        Raises:
            LoadError: There is no such file, or a line is not a request.
        """
        part = Part(start_s=self.start_s, seconds=self.seconds, speed=self.speed, scale=self.scale)
        part.check()
        times: list[float] = []
        if found := part.of(self._arrivals(times)):
            return found
        if not times:
            raise LoadError(f"the trace {self.file} has no requests: write each as a line such as {EXAMPLE}")
        until = "" if math.isinf(self.seconds) else f" for {self.seconds:g} s"
        raise LoadError(
            f"the trace {self.file} has no requests from second {self.start_s:g} on{until}: they leave from second "
            f"{min(times):g} to second {max(times):g}; give another --start-s or --seconds"
        )

    def _arrivals(self, times: list[float]) -> Iterator[Arrival]:
        """All arrivals of the file, one by one, since prompts take memory. ``times`` collects when they are sent."""
        for number, line in enumerate(self._lines(), start=1):
            if line.strip():
                arrival = self._read(line, number)
                times.append(arrival.at_s)
                yield arrival

    def _lines(self) -> list[str]:
        try:
            return self.file.read_text().splitlines()
        except OSError as error:
            raise LoadError(f"the trace {self.file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise LoadError(
                f"the trace {self.file} is not a text file: {error.reason} at byte {error.start}"
            ) from error

    def _read(self, line: str, number: int) -> Arrival:
        where = f"{self.file}: line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise LoadError(f"{where} is {reprlib.repr(line)}, but must be a JSON object such as {EXAMPLE}")
        try:
            if "timestamp" in row:
                return parse_trace_row(row, scale=self.scale)
            return _plain(ArrivalRow.model_validate(row), number, self.scale)
        except ValidationError as error:
            raise LoadError(f"{where}: {_problem(error.errors()[0])}") from error
        except KeyError as error:
            raise LoadError(f"{where}: {error.args[0]} is missing") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise LoadError(f"{where} is not a valid request of a trace: {error}") from error


def _problem(problem: ErrorDetails) -> str:
    """The message about a mistake in a line, with the wrong value."""
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {place!r}; known keys: {', '.join(ArrivalRow.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}, got {reprlib.repr(problem['input'])}" if place else message


def _plain(row: ArrivalRow, number: int, scale: int) -> Arrival:
    num_prompt = scaled_length(row.prompt_tokens, scale)
    tokens = tokens_named(f"request/{number}", num_prompt)
    if row.prefix is not None:
        num_shared = num_prompt if row.prefix_tokens is None else min(row.prefix_tokens // scale, num_prompt)
        tokens = np.concatenate([tokens_named(f"prefix/{row.prefix}", num_shared), tokens[num_shared:]])
    return Arrival(
        at_s=row.t,
        prompt=TokenIds(tokens.astype("<i4").tobytes()),
        num_output_tokens=scaled_length(row.output_tokens, scale),
        kind="trace",
        promise=Promise(ttft_ms=row.ttft_ms, itl_ms=row.itl_ms),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedSource:
    """A synthetic load: a mix and a shape at a mean rate. Both halves of a step load have this rate."""

    mix: str
    shape: str
    rate: float
    seconds: float
    seed: int = 0

    def load(self) -> list[Arrival]:
        """The requests of the load.

        Raises:
            LoadError: There is no such load, or it has no requests within its time, or too many.
        """
        rates = dict.fromkeys(("prompt_heavy", "balanced", "decode_heavy"), self.rate)
        spec = LoadSpec(
            mix=self.mix,
            shape=self.shape,  # type: ignore[arg-type]  # LoadSpec checks it
            rates=rates,
            seconds=self.seconds,
            seed=self.seed,
        )
        if self.rate * self.seconds > MAX_DESCRIBED:
            raise LoadError(
                f"a rate of {self.rate:g} requests a second brings {self.rate * self.seconds:.3g} requests in "
                f"{self.seconds:g} s, of which at most {MAX_DESCRIBED:,} are simulated: take fewer --seconds"
            )
        arrivals = make_load(spec)
        if not arrivals:
            raise LoadError(f"a rate of {self.rate:g} requests a second brings none in {self.seconds:g} s")
        return arrivals


Source = TraceSource | RecordedSource | DescribedSource


def warm_up_of(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The warm-up from which workers learn: the beginning of the load, with prompts that share no prefix with it."""
    early = [arrival for arrival in arrivals if arrival.at_s < WARM_UP_S][:MAX_WARM_UP]
    return [replace(arrival, prompt=_others(arrival.prompt)) for arrival in early]


def _others(prompt: TokenIds) -> TokenIds:
    return TokenIds((prompt.array ^ WARM_UP_BIT).astype("<i4").tobytes())
