"""A machine, and the errors of predictions with it compared to measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from pydantic import TypeAdapter, ValidationError

from simulation.machine import CPU_HOST, MACHINES, Machine, MachineFileError, load_machine, parse_machine

FIGURES = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p99_ms", "goodput")
"""The figures that were compared with real runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureError:
    """The error of a figure, in percent of the real value, in the runs that were not used for fitting."""

    mean: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A worker's machine, and the errors of ``FIGURES`` by name; empty if no run was compared. ``origin``: a text that
    says where its prices come from, if its name does not.
    """

    machine: Machine
    errors: Mapping[str, FigureError] = field(default_factory=dict)
    origin: str = ""

    def save(self, file: Path) -> None:
        """Write it as JSON, which ``find_calibration`` reads."""
        errors = {name: asdict(error) for name, error in self.errors.items()}
        file.write_text(json.dumps({"machine": asdict(self.machine), "errors": errors}, indent=1) + "\n")


PACKAGED = Calibration(
    machine=CPU_HOST,
    errors=MappingProxyType(
        {
            "ttft_p50_ms": FigureError(mean=5.6, worst=15.7),
            "ttft_p90_ms": FigureError(mean=6.4, worst=18.4),
            "itl_p50_ms": FigureError(mean=4.1, worst=10.6),
            "itl_p99_ms": FigureError(mean=13.1, worst=39.3),
            "goodput": FigureError(mean=1.4, worst=12.1),
        }
    ),
)
"""Workers of one thread, two on a host (``benchmarks/results/whatif_check.json``)."""

_ERRORS = TypeAdapter(dict[str, FigureError])


def find_calibration(text: str) -> Calibration:
    """A calibration by the name of its machine, or by its file. A machine's own file has no errors.

    Raises:
        MachineFileError: There is none; the message says what is wrong.
    """
    if text == CPU_HOST.name:
        return PACKAGED
    if text in MACHINES:
        return Calibration(machine=MACHINES[text])
    file = Path(text)
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise MachineFileError(
            f"{text} cannot be read: {error.strerror}; known names: {', '.join(MACHINES)}"
        ) from error
    except ValueError as error:
        raise MachineFileError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or "machine" not in content:
        return Calibration(machine=load_machine(file))
    unknown = sorted(set(content) - {"machine", "errors"})
    if unknown:
        raise MachineFileError(f"{file}: {unknown[0]} is not a key of a calibration: machine and errors are")
    machine = parse_machine(content["machine"], f"{file}: machine")
    return Calibration(machine=machine, errors=_parse_errors(content.get("errors", {}), file))


def _parse_errors(content: object, file: Path) -> Mapping[str, FigureError]:
    try:
        errors = _ERRORS.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("errors", *first["loc"])))
        raise MachineFileError(f"{file}: {place}: {first['msg']}") from error
    unknown = sorted(set(errors) - set(FIGURES))
    if unknown:
        raise MachineFileError(f"{file}: errors.{unknown[0]} is no figure: {', '.join(FIGURES)} are")
    return errors
