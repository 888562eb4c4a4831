"""The tokenizer of a directory: special tokens, the beginning of a text, and what is said when it cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.errors import ModelDirectoryError
from router.text.tokenizer import Tokenizer
from tests.support.router_tokenizer import BOS, byte_level_tokenizer, write_model_dir


@pytest.mark.parametrize(
    ("adds_bos", "config", "expected"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
        (True, {"add_bos_token": True}, True),
    ],
)
def test_beginning_of_text_follows_the_files(
    tmp_path: Path, adds_bos: bool, config: dict[str, object], expected: bool
) -> None:
    write_model_dir(tmp_path, tokenizer=byte_level_tokenizer(adds_bos=adds_bos), config=config)
    tokenizer = Tokenizer.load(tmp_path)

    ids = tokenizer.encode("hello")

    assert (ids[0] == tokenizer.token_id(BOS)) is expected
    assert tokenizer.decode(ids) == "hello"


def test_rendered_chats_get_no_second_beginning(tmp_path: Path) -> None:
    write_model_dir(tmp_path, tokenizer=byte_level_tokenizer(adds_bos=True))
    tokenizer = Tokenizer.load(tmp_path)

    ids = tokenizer.encode(BOS + "hello", add_special_tokens=False)

    assert [token == tokenizer.bos_token_id for token in ids].count(True) == 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    write_model_dir(tmp_path, tokenizer=backend)
    tokenizer = Tokenizer.load(tmp_path)

    assert tokenizer.decode(tokenizer.encode("a rather long text")) == "a rather long text"
    assert len(tokenizer.encode("a")) == 1


def test_special_tokens_are_read_as_text_or_as_objects(tmp_path: Path) -> None:
    write_model_dir(tmp_path, config={"eos_token": {"content": "<|end|>", "lstrip": False}})

    assert Tokenizer.load(tmp_path).special.eos_token == "<|end|>"


def test_directory_without_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_model_dir(tmp_path)
    (tmp_path / name).write_text('{"model":')

    with pytest.raises(ModelDirectoryError, match=name.replace(".", r"\.")):
        Tokenizer.load(tmp_path)
