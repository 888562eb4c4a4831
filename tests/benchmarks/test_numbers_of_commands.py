"""Options that benchmarks refuse before they measure anything."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.arguments import at_least, count, positive
from benchmarks.engine import MAX_MODEL_LEN, MAX_NUM_SEQS, check_batches
from benchmarks.peers.process import has_exactly


@pytest.mark.parametrize(
    ("kind", "text"),
    [(count, "0"), (count, "1.5"), (at_least(16), "15"), (positive, "0"), (positive, "inf"), (positive, "nan")],
)
def test_number_that_means_nothing_is_refused(
    kind: Callable[[str], float], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=kind)

    with pytest.raises(SystemExit):
        parser.parse_args(["--number", text])

    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("batches", "num_tokens"), [([1, MAX_NUM_SEQS + 1], 8), ([1], MAX_MODEL_LEN)])
def test_batch_that_an_engine_would_split_or_end_early_is_refused(batches: list[int], num_tokens: int) -> None:
    with pytest.raises(SystemExit):
        check_batches(argparse.ArgumentParser(), batches, num_tokens=num_tokens)


def test_peer_of_another_version_is_not_taken_for_the_one_that_is_named() -> None:
    python, version = Path(sys.executable), importlib.metadata.version("numpy")

    assert has_exactly(python, (f"numpy[extra]=={version}",))
    assert not has_exactly(python, (f"numpy=={version}.1",))
    assert not has_exactly(python, ("no-such-package==1",))
