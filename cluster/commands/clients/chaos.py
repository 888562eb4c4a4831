"""`baton chaos`: a scenario against a running cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from cluster.chaos.runner import ChaosRunner
from cluster.chaos.scenario import ScenarioError, load_scenario
from cluster.client import bearer
from cluster.commands.signals import run_until_stopped


def chaos(url: str, path: Path, console: Console, *, api_key: str = "", json_file: Path | None = None) -> bool:
    """Run a scenario and print its report.

    Returns:
        True when all checks hold.

    Raises:
        ScenarioError: The file is not a scenario, or the scenario cannot be run here.
        httpx.HTTPError: The cluster does not answer, or refuses.
    """
    tell = teller(console)
    if json_file is not None:
        with writing(json_file), json_file.open("a"):  # so that it fails now, and not after minutes of load
            pass
    runner = ChaosRunner(load_scenario(path), url=url, headers=bearer(api_key), tell=tell)
    report = asyncio.run(run_until_stopped(runner.run()))
    for line in report.lines():
        tell(line)
    if json_file is not None:
        with writing(json_file):
            json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    return not report.problems


def teller(console: Console) -> Callable[[str], None]:
    """A function that prints lines. They are wrapped only on a terminal."""

    def tell(line: str) -> None:
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=not console.is_terminal)

    return tell


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn an error while writing a file into a message that names the file.

    Raises:
        ScenarioError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ScenarioError(f"cannot write the report to {file}: {error.strerror or error}") from error
