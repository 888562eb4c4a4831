"""What a model's generation_config.json says is what a request gets that says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.errors import ModelDirectoryError
from router.text.generation_config import load_generation_defaults
from router.text.tokenizer import Tokenizer
from tests.support.cluster.served_checkpoint import SPECIAL_TOKENS, byte_tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), config={"eos_token": SPECIAL_TOKENS[2]})


def write(path: Path, **fields: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def test_without_a_file_the_defaults_are_openais(tmp_path: Path, tokenizer: Tokenizer) -> None:
    defaults = load_generation_defaults(tmp_path, tokenizer)

    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, 0)
    assert defaults.eos_token_ids == (2,)


def test_the_file_is_taken(tmp_path: Path, tokenizer: Tokenizer) -> None:
    defaults = load_generation_defaults(
        write(tmp_path, do_sample=True, temperature=0.6, top_k=20, eos_token_id=[7, 8, 7]), tokenizer
    )

    assert (defaults.temperature, defaults.top_k, defaults.eos_token_ids) == (0.6, 20, (7, 8))


def test_do_sample_false_is_greedy(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert load_generation_defaults(write(tmp_path, do_sample=False), tokenizer).temperature == 0.0


def test_a_value_of_the_wrong_type_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelDirectoryError, match="temperature must be a number, got 'hot'"):
        load_generation_defaults(write(tmp_path, temperature="hot"), tokenizer)
