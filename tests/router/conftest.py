"""Fixtures of the router's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.router.router_tokenizer import write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer, its special tokens and a chat template."""
    return write_model_dir(tmp_path_factory.mktemp("tiny-model"))
