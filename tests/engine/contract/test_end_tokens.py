"""Routers and engines find the same end-of-sequence tokens in a checkpoint: the named ones, and the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.contract.checkpoint.end_tokens import read_end_tokens
from engine.contract.config import ModelConfigSource
from engine.contract.errors import CheckpointError
from engine.runner.model_runner import grammar_store
from router.text.generation_config import load_generation_defaults
from tests.support.cluster.served_checkpoint import SPECIAL_TOKENS, byte_tokenizer
from tests.support.engine.checkpoints import edit_config, make_checkpoint

TOKENIZER_END = 2


def _write(
    path: Path, *, config: dict[str, Any], generation: dict[str, Any] | None, tokenizer: dict[str, Any] | None
) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    if tokenizer is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [5, 6, 5]}, (5, 6)),
        ({"eos_token_id": [7, 2]}, None, (7, 2)),
    ],
)
def test_named_tokens_and_the_tokenizers(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    _write(tmp_path, config=config, generation=generation, tokenizer=None)
    assert read_end_tokens(tmp_path) == expected

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL_TOKENS[2]}))
    assert read_end_tokens(tmp_path) == tuple(dict.fromkeys((*expected, TOKENIZER_END)))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"eos_token": {"content": SPECIAL_TOKENS[2], "lstrip": False}}, (TOKENIZER_END,)),
        ({"eos_token": "!"}, (byte_tokenizer().token_to_id("!"),)),
        ({"eos_token": "no such token"}, ()),
        ({"eos_token": None}, ()),
    ],
)
def test_how_the_tokenizer_names_its_end(tmp_path: Path, tokenizer: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert read_end_tokens(_write(tmp_path, config={}, generation=None, tokenizer=tokenizer)) == expected


def test_end_of_a_vocabulary_that_is_a_list(tmp_path: Path) -> None:
    _write(tmp_path, config={}, generation=None, tokenizer=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0], ["</s>", -2.0]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model}))

    assert read_end_tokens(tmp_path) == (2,)


def test_a_directory_without_a_tokenizer_has_the_named_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))

    assert read_end_tokens(tmp_path) == (7,)


@pytest.mark.parametrize("value", ["2", [True], 2.0])
def test_what_is_no_token_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id must be an integer or a list"):
        read_end_tokens(_write(tmp_path, config={"eos_token_id": value}, generation=None, tokenizer=None))


@pytest.mark.parametrize("generation", [None, {"eos_token_id": None}])
def test_grammars_end_by_the_tokens_that_requests_ask_for(tmp_path: Path, generation: dict[str, Any] | None) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    config = json.loads((path / "config.json").read_text())
    _write(path, config=config, generation=generation, tokenizer={"eos_token": SPECIAL_TOKENS[2]})
    edit_config(path, eos_token_id=None)

    asked_for = load_generation_defaults(path).eos_token_ids
    assert asked_for == grammar_store(ModelConfigSource(path=path)).eos_token_ids == (TOKENIZER_END,)
