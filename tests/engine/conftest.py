"""Checkpoints that the engine's tests share; each is made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.checkpoints import make_checkpoint

CheckpointMaker = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """A random checkpoint of an architecture, as ``make_checkpoint`` makes it; tests must not change its files."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_checkpoint(tmp_path_factory.mktemp("shared") / architecture, architecture)
        return made[architecture]

    return make
