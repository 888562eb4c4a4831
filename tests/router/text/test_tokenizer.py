"""The tokenizer of a directory: special tokens, the beginning of a text, and the error if it cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from router.errors import ModelDirectoryError
from router.text.tokenizer import Tokenizer
from tests.support.router.router_tokenizer import BOS, byte_level_tokenizer, write_model_dir


@pytest.mark.parametrize(
    "tokenizer_class",
    ["LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast"],
)
@pytest.mark.parametrize("adds_bos", [True, False])
def test_beginning_of_text_follows_tokenizer_json_as_in_transformers(
    tmp_path: Path, adds_bos: bool, tokenizer_class: str
) -> None:
    """``add_bos_token`` of tokenizer_config.json is for tokenizers that are not in tokenizer.json."""
    for said in ({}, {"add_bos_token": True}, {"add_bos_token": False}):
        config = {"tokenizer_class": tokenizer_class, **said}
        path = write_model_dir(tmp_path, tokenizer=byte_level_tokenizer(adds_bos=adds_bos), config=config)
        (path / "config.json").write_text('{"model_type": "llama"}')
        tokenizer = Tokenizer.load(path)

        ids = tokenizer.encode("hello")

        assert ids == AutoTokenizer.from_pretrained(path)("hello").input_ids
        assert (ids[0] == tokenizer.token_id(BOS)) is adds_bos
        assert tokenizer.decode(ids) == "hello"


def test_rendered_chats_get_no_second_beginning(tmp_path: Path) -> None:
    write_model_dir(tmp_path, tokenizer=byte_level_tokenizer(adds_bos=True))
    tokenizer = Tokenizer.load(tmp_path)

    ids = tokenizer.encode(BOS + "hello", add_special_tokens=False)

    assert [token == tokenizer.token_id(BOS) for token in ids].count(True) == 1


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

    assert Tokenizer.load(tmp_path).special.named["eos_token"] == "<|end|>"


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


BOUNDED = byte_level_tokenizer()
COMPOSING = byte_level_tokenizer()
COMPOSING.normalizer = normalizers.NFC()


@pytest.mark.parametrize("backend", [BOUNDED, COMPOSING], ids=["bytes", "nfc"])
@given(text=st.text(st.sampled_from("the runner\u212a\u1f82\u0301e🙂 ") | st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=100, deadline=None)
def test_bound_of_tokens_is_never_above_their_number(backend: tokenizers.Tokenizer, text: str) -> None:
    tokenizer = Tokenizer(backend)

    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))


def test_long_text_has_a_bound_of_tokens_above_zero() -> None:
    assert Tokenizer(BOUNDED).min_num_tokens("x" * 1000) > 10


def _stripping() -> tokenizers.Tokenizer:
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken("<|cut|>", rstrip=True)])
    return backend


def _dropping() -> tokenizers.Tokenizer:
    backend = byte_level_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def _shrinking() -> tokenizers.Tokenizer:
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.Strip()
    return backend


def _with_unknown() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))


@pytest.mark.parametrize("make", [_stripping, _dropping, _shrinking, _with_unknown])
def test_tokenizer_that_may_lose_text_has_no_bound(make: Callable[[], tokenizers.Tokenizer]) -> None:
    assert Tokenizer(make()).min_num_tokens("x" * 10_000) == 0


def test_texts_are_tokenized_together_as_one_by_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model_dir(tmp_path, tokenizer=byte_level_tokenizer(adds_bos=True)))
    texts = ["hello world", "a baton", "", "🙂 the lazy dog"]

    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_all(texts)[0] == [
        tokenizer.token_id(BOS),
        *tokenizer.backend.encode("hello world", add_special_tokens=False).ids,
    ]
