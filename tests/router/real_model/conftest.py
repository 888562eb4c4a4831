"""One small model for all tests over HTTP that need a real one, with reference outputs by transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.engine.checkpoints import load_oracle
from tests.support.router.model_router import VOCAB_SIZE, ModelRouter, model_router


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("bytes") / "llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def oracle(checkpoint_dir: Path) -> PreTrainedModel:
    return load_oracle(checkpoint_dir)


@pytest.fixture
async def live(checkpoint_dir: Path) -> AsyncIterator[ModelRouter]:
    async with model_router(checkpoint_dir) as router:
        yield router
