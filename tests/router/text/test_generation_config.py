"""A model's generation_config.json gives the defaults of requests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from router.errors import ModelDirectoryError
from router.text.generation_config import load_generation_defaults
from tests.support.router.router_tokenizer import EOS, byte_level_tokenizer, write_model_dir


def write(path: Path, **fields: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def test_without_a_file_the_defaults_are_openais(tmp_path: Path) -> None:
    defaults = load_generation_defaults(write_model_dir(tmp_path))

    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, 0)
    assert defaults.eos_token_ids == (byte_level_tokenizer().token_to_id(EOS),)


def test_the_file_is_taken(tmp_path: Path) -> None:
    defaults = load_generation_defaults(
        write(tmp_path, do_sample=True, temperature=0.6, top_k=20, eos_token_id=[7, 8, 7]),
    )

    assert (defaults.temperature, defaults.top_k, defaults.eos_token_ids) == (0.6, 20, (7, 8))


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    assert load_generation_defaults(write(tmp_path, do_sample=False)).temperature == 0.0


def test_a_value_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match="temperature must be a number, got 'hot'"):
        load_generation_defaults(write(tmp_path, temperature="hot"))


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -1, "greater than or equal to 0"),
        ("temperature", math.nan, "a finite number"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", 2**31, "less than or equal to 2147483647"),
        ("top_k", math.inf, "a finite number"),
        ("repetition_penalty", math.nan, "a finite number"),
        ("min_p", 2, "less than or equal to 1"),
        ("repetition_penalty", 0, "greater than 0"),
    ],
)
def test_a_value_beyond_what_requests_may_ask_for_is_named(tmp_path: Path, name: str, value: float, limit: str) -> None:
    """Of the tokens that ``min_p: 2`` leaves, none could be drawn, and a ``top_k`` of 2**31 fits in no row."""
    with pytest.raises(ModelDirectoryError, match=f"generation_config.json: {name} should be .*{limit}, got {value}"):
        load_generation_defaults(write(tmp_path, **{name: value}))


@pytest.mark.parametrize(("name", "value"), [("temperature", 0), ("top_p", 0), ("top_k", -1), ("top_k", 50.0)])
def test_values_that_checkpoints_come_with_are_taken(tmp_path: Path, name: str, value: float) -> None:
    assert getattr(load_generation_defaults(write(tmp_path, **{name: value})), name) == value


def test_a_whole_number_of_a_logits_processor_is_one(tmp_path: Path) -> None:
    value = load_generation_defaults(write(tmp_path, no_repeat_ngram_size=3.0)).logits["no_repeat_ngram_size"]

    assert (value, type(value)) == (3, int)


def test_an_end_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match="eos_token_id must be an integer or a list of integers, got '2'"):
        load_generation_defaults(write(tmp_path, eos_token_id="2"))
