"""Texts of single tokens."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from router.text.detokenizer import DetokenizerFactory
from router.text.token_spelling import Spelling, TokenSpeller
from router.text.tokenizer import Tokenizer
from tests.support.router.router_tokenizer import EOS, byte_level_tokenizer


def speller(backend: Backend) -> TokenSpeller:
    tokenizer = Tokenizer(backend)
    return TokenSpeller(tokenizer, DetokenizerFactory(tokenizer).table)


def test_bytes_that_are_no_character_keep_their_value() -> None:
    backend = byte_level_tokenizer()
    spell = speller(backend).spell
    halves = [spell(token_id) for token_id in backend.encode("é", add_special_tokens=False).ids]

    assert [half.data for half in halves] == [b"\xc3", b"\xa9"]
    assert [half.text for half in halves] == ["\ufffd", "\ufffd"]
    assert not any(half.is_whole for half in halves)


def test_special_tokens_are_spelt_out() -> None:
    backend = byte_level_tokenizer()

    assert speller(backend).spell(backend.token_to_id(EOS)) == Spelling(EOS, EOS.encode())


def test_a_space_belongs_to_its_token() -> None:
    backend = byte_level_tokenizer()
    ids = backend.encode("the fox", add_special_tokens=False).ids
    spellings = [speller(backend).spell(token_id) for token_id in ids]

    assert "".join(spelling.text for spelling in spellings) == "the fox"
    assert all(spelling.is_whole for spelling in spellings)


def test_an_id_without_a_token_is_empty() -> None:
    assert speller(byte_level_tokenizer()).spell(10**6) == Spelling("", b"")


def test_a_tokenizer_without_bytes_spells_by_decoding() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "run": 1, "##ner": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()

    assert speller(backend).spell(1) == Spelling("run", b"run")
