"""The descriptions of architectures match what they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from engine.attention.factory import check_attention
from engine.contract.errors import ConfigError
from engine.model.registry import ARCHITECTURES, architectures, load_model_config
from scripts.marked_tests import ROOT
from scripts.models_page import page
from tests.support.engine.checkpoints import ARCHITECTURES as FULLY_TESTED
from tests.support.engine.checkpoints import FAMILIES


def test_the_page_of_models_is_that_of_the_registry() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == page(), "python -m scripts.models_page > docs/models.md"


def test_every_architecture_has_a_family_and_a_description() -> None:
    facts = architectures()
    assert {fact.name for fact in facts} == set(ARCHITECTURES)
    assert all(fact.family and fact.description for fact in facts)


def test_the_command_lists_every_architecture() -> None:
    result = CliRunner().invoke(app, ["models"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ARCHITECTURES)


@pytest.mark.parametrize("family", (*FULLY_TESTED, *FAMILIES))
def test_gpus_refuse_exactly_the_architectures_that_say_so(checkpoint: Callable[[str], Path], family: str) -> None:
    config = load_model_config(checkpoint(family))
    (fact,) = (fact for fact in architectures() if fact.name == config.architecture)
    if fact.cpu_only is None:
        check_attention(config.architecture, config.attention, "cuda")
    else:
        with pytest.raises(ConfigError, match=fact.cpu_only):
            check_attention(config.architecture, config.attention, "cuda")
