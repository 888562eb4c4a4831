"""The descriptions of architectures match what they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from engine.attention.factory import check_attention
from engine.contract.errors import ConfigError
from engine.model.registry import ARCHITECTURES, architectures, is_native, load_model_config
from scripts.marked_tests import ROOT
from scripts.models_page import page
from tests.support.engine.checkpoints import ARCHITECTURES as FULLY_TESTED
from tests.support.engine.checkpoints import FAMILIES, make_checkpoint
from tests.support.engine.transformers_families import TRANSFORMERS_FAMILIES


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


def test_every_architecture_has_a_checkpoint_that_tests_compare_with_transformers(
    checkpoint: Callable[[str], Path],
) -> None:
    tested = {load_model_config(checkpoint(family)).architecture for family in (*FULLY_TESTED, *FAMILIES)}
    assert tested == set(ARCHITECTURES), "add its entry to FAMILIES and _CONFIGS in tests/support/engine/checkpoints.py"


@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_what_transformers_code_is_tested_with_is_not_computed_natively(tmp_path: Path, family: str) -> None:
    """An architecture that Baton computes itself by now moves from transformers_families.py to checkpoints.py."""
    path = make_checkpoint(tmp_path, family)
    assert not is_native(json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("family", (*FULLY_TESTED, *FAMILIES))
def test_gpus_refuse_exactly_the_architectures_that_say_so(checkpoint: Callable[[str], Path], family: str) -> None:
    config = load_model_config(checkpoint(family))
    (fact,) = (fact for fact in architectures() if fact.name == config.architecture)
    if fact.cpu_only is None:
        check_attention(config.architecture, config.attention, "cuda")
    else:
        with pytest.raises(ConfigError, match=fact.cpu_only):
            check_attention(config.architecture, config.attention, "cuda")
