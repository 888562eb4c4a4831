"""Loads on layouts of two threads: those for fitting a calibration, and six others for checking it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from engine.contract.promise import NO_PROMISE, Promise
from simulation.loads import Arrival, LoadSpec, Shape, make_load
from simulation.machine import Machine
from simulation.outcome import Outcome

APART, UNIFIED, ELASTIC = "apart:1+1", "unified:2", "elastic:2"
LAYOUTS = (APART, UNIFIED, ELASTIC)
PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)
"""What requests are promised where roles are elastic; elsewhere nothing is."""

CAPACITY = {"prompt_heavy": 2.4, "balanced": 4.2, "decode_heavy": 4.2}
"""Approximate number of requests per second of a mix that two workers of one thread each can serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load, as a ``share`` of what the workers could serve."""

    name: str
    mix: str
    shape: Shape
    share: float
    seed: int

    def load(self, seconds: float) -> list[Arrival]:
        """The requests of the load."""
        rates = {mix: self.share * rate for mix, rate in CAPACITY.items()}
        return make_load(LoadSpec(mix=self.mix, shape=self.shape, rates=rates, seconds=seconds, seed=self.seed))


FITTED = (
    Case(name="fit/low/balanced/steady", mix="balanced", shape="steady", share=0.3, seed=501),
    Case(name="fit/mid/prompt_heavy/steady", mix="prompt_heavy", shape="steady", share=0.45, seed=502),
    Case(name="fit/mid/decode_heavy/bursts", mix="decode_heavy", shape="bursts", share=0.5, seed=503),
)
CHECKED = (
    Case(name="low/balanced/steady", mix="balanced", shape="steady", share=0.35, seed=601),
    Case(name="mid/decode_heavy/steady", mix="decode_heavy", shape="steady", share=0.6, seed=602),
    Case(name="mid/prompt_heavy/steady", mix="prompt_heavy", shape="steady", share=0.5, seed=603),
    Case(name="high/balanced/steady", mix="balanced", shape="steady", share=0.75, seed=604),
    Case(name="mid/balanced/bursts", mix="balanced", shape="bursts", share=0.5, seed=605),
    Case(name="mid/decode_heavy/step", mix="decode_heavy", shape="step", share=0.5, seed=606),
)
CASES = {case.name: case for case in (*FITTED, *CHECKED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured outcomes of a case's requests on a layout, and the reports of its workers afterwards."""

    layout: str
    case: str
    seconds: float
    outcomes: Sequence[Outcome]
    reported: Machine | None = None

    @property
    def promise(self) -> Promise:
        """What the requests were promised."""
        return PROMISE if self.layout == ELASTIC else NO_PROMISE


_MEASURED = TypeAdapter(Measured)


def save(measured: Sequence[Measured], file: Path) -> None:
    """Write the runs as JSON, one per line."""
    file.write_text("".join(json.dumps(asdict(run)) + "\n" for run in measured))


def read(files: Sequence[Path]) -> list[Measured]:
    """Read stored runs.

    Raises:
        SystemExit: A file is not there, or is none.
    """
    found: list[Measured] = []
    for file in files:
        try:
            found += [_MEASURED.validate_json(line) for line in file.read_text().splitlines()]
        except OSError as error:
            raise SystemExit(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise SystemExit(f"{file} has no measured runs: {error!r}") from error
    return found
