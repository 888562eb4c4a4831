"""Bodies, headers and methods made from the served OpenAPI document, by schemathesis, against a cluster.

`python -m scripts.fuzz --cases 5000` starts a cluster with the built-in model and keys, sends that many cases, and ends
with an error if any got a 5xx, no answer in time, an answer that the document does not promise, or was taken though the
document forbids it; or if anything is left running afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import yaml

from benchmarks.arguments import count
from benchmarks.process_group import end_on_sigterm
from benchmarks.served import served_cluster
from router.security import hash_key, new_key

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
ANSWER_TIMEOUT_S = 60
RUN_TIMEOUT_S = 3600
EXAMPLES_A_ROUND = 400
MAX_ROUNDS = 20
NUM_GENERATED = re.compile(r"(\d+) generated")

SETTINGS = """[parameters]
"header.X-Request-Timeout" = "60"
"""
"""A deadline that is drawn at random would be missed, which is a 504 and no fault."""

CLUSTER = {"max_model_len": 256, "router": {"default_max_tokens": 8}}
"""Answers are short: it is not the model that is tested."""

FOLDER_PREFIX = "baton-fuzz-"
"""The beginning of the names of temporary folders; the id of the process that uses one follows."""

HELD = ("num_running", "num_waiting", "num_loading", "num_leased_blocks", "num_held_blocks")


class FuzzError(Exception):
    """What schemathesis found, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and the key that opens all of it; empty where none is needed."""

    url: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What each request needs."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def fuzz(target: Target, *, phases: str, num_examples: int, seed: int) -> int:
    """Send cases until each operation had ``num_examples`` of them; returns how many were sent.

    Raises:
        FuzzError: A check failed, or a case got no answer.
    """
    with own_folder() as folder:
        settings = folder / "schemathesis.toml"
        settings.write_text(SETTINGS)
        command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(settings), "run"]
        command += [f"{target.url}/openapi.json", "--phases", phases, "--checks", checks(target)]
        command += ["--max-examples", str(num_examples), "--seed", str(seed), "--no-color", "--warnings", "off"]
        command += ["--exclude-path-regex", "^/admin/"]  # orders to drain workers and to break them are carried out
        command += ["--request-timeout", str(ANSWER_TIMEOUT_S), "--continue-on-failure"]
        for name, value in target.headers.items():
            command += ["--header", f"{name}: {value}"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise FuzzError(result.stdout + result.stderr)
    found = NUM_GENERATED.search(result.stdout)
    if found is None:
        raise FuzzError(f"no count of cases in:\n{result.stdout}")
    return int(found.group(1))


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder. Those of processes that were killed are removed, too."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        user = left.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if user.isdigit() and not Path("/proc", user).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def checks(target: Target) -> str:
    """Names of the checks, as an option wants them."""
    return ",".join((*CHECKS, "ignored_auth") if target.key else CHECKS)


def check_at_rest(target: Target) -> None:
    """Nothing runs, waits, loads or is leased any more, and no request failed.

    Raises:
        FuzzError: Something does.
    """
    with httpx.Client(base_url=target.url, headers=target.headers, timeout=30, trust_env=False) as client:
        status = client.get("/status").json()
    left = [
        f"{row['replica_id']} {key}={row[key]}"
        for rows in status["pools"].values()
        for row in rows
        for key in HELD
        if row[key]
    ]
    if left or status["router"]["server_load"] or status["totals"]["failed"]:
        raise FuzzError(f"left behind: {left}; router: {status['router']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a cluster, send the cases, tell the outcome; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=count, default=5000, help="minimal number of cases")
    parser.add_argument("--seed", type=int, default=1, help="seed: the same seed gives the same cases")
    options = parser.parse_args(arguments)
    key = new_key()
    end_on_sigterm()
    with own_folder() as folder:
        config = folder / "baton.yaml"
        keys = {"admin_keys": [hash_key(key)], "api_keys": [hash_key(new_key())]}
        config.write_text(yaml.safe_dump({**CLUSTER, "security": keys}))
        try:
            with served_cluster(["--config", str(config)]) as url:
                target = Target(url=url, key=key)
                num_cases = run_rounds(partial(one_round, target), num_cases=options.cases, seed=options.seed)
        except FuzzError as error:
            print(error, file=sys.stderr)
            return 1
    print(f"{num_cases} cases, no 5xx, no hang, nothing that the document does not describe (seed {options.seed})")
    return 0


def one_round(target: Target, number: int, seed: int) -> int:
    """The cases of a round, after which nothing may be left behind; returns how many there were.

    Raises:
        FuzzError: A check failed, or something is left.
    """
    phases = "coverage,fuzzing" if number == 0 else "fuzzing"
    num_cases = fuzz(target, phases=phases, num_examples=EXAMPLES_A_ROUND, seed=seed)
    check_at_rest(target)
    return num_cases


def run_rounds(do_round: Callable[[int, int], int], *, num_cases: int, seed: int) -> int:
    """Round after round with other seeds, until there were enough cases.

    Raises:
        FuzzError: A check failed, or so many rounds did not make so many cases.
    """
    total = 0
    for number in range(MAX_ROUNDS):
        total += do_round(number, seed + number)
        print(f"{total} cases", flush=True)
        if total >= num_cases:
            return total
    raise FuzzError(f"{MAX_ROUNDS} rounds made {total} cases instead of the requested {num_cases}")


if __name__ == "__main__":
    sys.exit(main())
