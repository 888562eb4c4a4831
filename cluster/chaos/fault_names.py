"""The connector faults that a scenario can name, and how they are shown to users."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from kv_transfer.errors import InvalidOptionError
from kv_transfer.fault_options import Fault, FaultOptions

NAMES = tuple(item.name for item in dataclasses.fields(FaultOptions) if item.name != "schedule")


def known_faults(faults: dict[str, float]) -> dict[str, float]:
    """Check that all these faults exist, and return them.

    Raises:
        ValueError: A fault does not exist, or its value is invalid.
    """
    for name in faults:
        if name not in NAMES:
            nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known faults: {', '.join(NAMES)}"
            raise ValueError(f"there is no fault {name!r}; {hint}")
    values = {name: int(value) if name == "seed" else value for name, value in faults.items()}
    try:
        FaultOptions(**values)  # type: ignore[arg-type]  # the names are checked
    except InvalidOptionError as error:
        raise ValueError(str(error)) from error
    return faults


def words_of(faults: Mapping[str, float]) -> str:
    """A readable text of the faults: first the probability of each, then their other options."""
    told = [f"{name} {100 * value:g} %" for name, value in faults.items() if name in set(Fault)]
    if "late_s" in faults:
        told.append(f"late by {faults['late_s']:g} s")
    if "seed" in faults:
        told.append(f"seed {faults['seed']:g}")
    return ", ".join(told) or "none"
