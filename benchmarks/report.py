"""Rows of results: printed as a table with machine, versions and command, and written as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value with a stable name. ``detail`` has further values (ratios, counts, peers)."""

    name: str
    value: float
    unit: str
    detail: dict[str, float | str] = field(default_factory=dict)

    def as_json(self) -> dict[str, float | str]:
        """The row as one flat object."""
        fields = asdict(self)
        detail = fields.pop("detail")
        return {**fields, **detail}


def cpu_name() -> str:
    """The processor's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def describe_run(packages: Sequence[str]) -> dict[str, str]:
    """The circumstances of this run: machine, versions, command."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``, which every script here has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as a JSON list to FILE")


def kept_rows(file: Path | None) -> list[dict[str, Any]]:
    """The rows that an earlier run wrote to a file; empty if there is no such file."""
    if file is None or not file.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def publish(
    rows: Sequence[Row],
    *,
    packages: Sequence[str],
    json_file: Path | None,
    title: str,
    kept: Sequence[dict[str, Any]] = (),
) -> None:
    """Print the rows under a heading, and write them to the file, if any, after those rows of ``kept`` that have other
    names.
    """
    run = describe_run(packages)
    print(f"\n{title}")
    for key, value in run.items():
        print(f"  {key}: {value}")
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        detail = "  ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.detail.items()
        )
        print(f"  {row.name:<{width}}  {row.value:>12.4g} {row.unit:<8} {detail}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        new = {row.name for row in rows}
        written = [row for row in kept if row["name"] not in new] + [{**row.as_json(), "run": run} for row in rows]
        json_file.write_text(json.dumps(written, indent=1) + "\n")
        print(f"  rows written to {json_file}")
