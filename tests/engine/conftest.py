"""What the engine's tests share: checkpoints, each made once per session, and engines of which nothing is real but the
scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.frontend.engine_core import EngineCore
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.pausable_runner import PausableRunner

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


@pytest.fixture
def core() -> EngineCore:
    """An engine whose next token follows from the tokens before (``ChainRunner``)."""
    return chain_engine()


@pytest.fixture
def runner(core: EngineCore) -> PausableRunner:
    """Holds that engine's steps until the test lets them go."""
    core.runner = runner = PausableRunner(core.runner)
    return runner
