"""Incremental text against decoding everything at once, for the kinds of tokenizers that models come with."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.text.detokenizer import ByteDetokenizer, DetokenizerFactory, WindowDetokenizer
from router.text.tokenizer import Tokenizer as TextTokenizer
from tests.support.router.router_tokenizer import EOS, byte_level_tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a space mark, and bytes for everything else, as Llama 2 and Mistral have it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁hello", "▁world", "lo", "▁the", "a", "b", "e", "h", "l", "o", "é", "."]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("l", "o")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Whole words without a decoder: a token's text depends on whether it is the first one."""
    words = {word: index for index, word in enumerate(["[UNK]", "the", "quick", "brown", "fox", "."])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """Pieces that join the word before them, and a clean-up of spaces before punctuation."""
    words = {word: index for index, word in enumerate(["[UNK]", "run", "##ner", "##s", "fast", ".", "##"])}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def split_byte_tokenizer() -> Tokenizer:
    """Bytes and words, with a decoder that is not known to treat all tokens alike."""
    tokenizer = sentencepiece_tokenizer()
    tidying = decoders.Replace(Regex(" +"), " ")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), tidying]
    )
    return tokenizer


BYTE_LEVEL = TextTokenizer(byte_level_tokenizer())
SENTENCEPIECE = TextTokenizer(sentencepiece_tokenizer())
WORDS = TextTokenizer(word_tokenizer())
PIECES = TextTokenizer(wordpiece_tokenizer())
SPLIT_BYTES = TextTokenizer(split_byte_tokenizer())
BYTE_LEVEL_FACTORY = DetokenizerFactory(BYTE_LEVEL)
SENTENCEPIECE_FACTORY = DetokenizerFactory(SENTENCEPIECE)


def streamed(factory: DetokenizerFactory, prompt: list[int], output: list[int], sizes: list[int]) -> list[str]:
    """The pieces of text when tokens come in steps of the given sizes, one by one after that."""
    detokenizer = factory.make(prompt)
    pieces: list[str] = []
    rest = list(output)
    for size in sizes:
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    pieces += [detokenizer.push([token]) for token in rest]
    return [*pieces, detokenizer.finish()]


@given(
    tokens=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=24),
    sizes=st.lists(st.integers(1, 4), max_size=6),
)
def test_byte_level_stream_equals_decoding_at_once(tokens: list[int], sizes: list[int]) -> None:
    pieces = streamed(BYTE_LEVEL_FACTORY, [5], tokens, sizes)

    assert "".join(pieces) == BYTE_LEVEL.decode(tokens)


@given(text=st.text(max_size=20).filter(lambda text: "<|" not in text))  # special tokens are left out of answers
def test_no_piece_of_well_formed_text_holds_half_a_character(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text)

    pieces = streamed(BYTE_LEVEL_FACTORY, [5], tokens, [])

    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(text=st.text(alphabet="helo ab.é日🙂", min_size=1, max_size=20))
def test_sentencepiece_stream_continues_the_prompt_exactly(text: str) -> None:
    prompt, whole = SENTENCEPIECE.encode("hello"), SENTENCEPIECE.encode("hello" + text)
    if whole[: len(prompt)] != prompt:
        return
    pieces = streamed(SENTENCEPIECE_FACTORY, prompt, whole[len(prompt) :], [])

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_output_keeps_the_space_of_its_first_word() -> None:
    world = SENTENCEPIECE.token_id("▁world")
    assert world is not None

    assert streamed(SENTENCEPIECE_FACTORY, SENTENCEPIECE.encode("hello"), [world], [])[0] == " world"


@pytest.mark.parametrize("make", [word_tokenizer, wordpiece_tokenizer])
def test_other_tokenizers_stream_what_decoding_at_once_gives(make: type) -> None:
    tokenizer = TextTokenizer(make())
    factory = DetokenizerFactory(tokenizer)
    prompt, output = [1], [2, 3, 4, 1, 2, 4, 3, 2, 1, 4, 3, 5, 1, 2]

    pieces = streamed(factory, prompt, output, [2, 1, 3])

    assert isinstance(factory.make(prompt), WindowDetokenizer)
    assert "".join(pieces) == tokenizer.decode([*prompt, *output])[len(tokenizer.decode(prompt)) :]


SIZES = st.lists(st.integers(1, 9), max_size=8)
SILENT = {WORDS: ("[SEP]", 999), PIECES: ("[SEP]", "##", 999), SPLIT_BYTES: ("</s>", 9999)}
"""Tokens without text: special ones, pieces that are empty, and ids that no token has."""


def silent_runs(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    """Outputs with runs of tokens without text, some of them longer than any window."""
    silent = [token if isinstance(token, int) else tokenizer.token_id(token) for token in SILENT[tokenizer]]
    run = st.builds(lambda token, size: [token] * size, st.sampled_from(silent), st.integers(1, 40))
    spoken = st.lists(st.integers(1, tokenizer.vocab_size - 1), min_size=1, max_size=4)
    return st.lists(run | spoken, max_size=6).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("tokenizer", [WORDS, PIECES], ids=["words", "pieces"])
@given(data=st.data())
def test_runs_of_tokens_without_text_leave_the_text_as_decoding_at_once_gives_it(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    output = data.draw(silent_runs(tokenizer))
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=8))

    pieces = streamed(DetokenizerFactory(tokenizer), [1], output, sizes)

    assert "".join(pieces) == tokenizer.decode([1, *output])[len(tokenizer.decode([1])) :]


@given(num_silent=st.integers(0, 40), silent=st.sampled_from(SILENT[SPLIT_BYTES]))
def test_character_in_parts_is_whole_after_a_run_of_tokens_without_text(num_silent: int, silent: str | int) -> None:
    token = silent if isinstance(silent, int) else SPLIT_BYTES.token_id(silent)
    output = [token] * num_silent + SPLIT_BYTES.encode("🙂")[-4:]
    factory = DetokenizerFactory(SPLIT_BYTES)

    assert isinstance(factory.make([]), WindowDetokenizer)
    assert "".join(streamed(factory, SPLIT_BYTES.encode("hello"), output, [])) == "🙂"


def test_character_that_ends_among_tokens_that_came_at_once_is_whole() -> None:
    output = SPLIT_BYTES.encode("<<<<🙂")[-8:]

    assert "".join(streamed(DetokenizerFactory(SPLIT_BYTES), SPLIT_BYTES.encode("hello"), output, [5])) == "<<<<🙂"


@given(before=st.text(alphabet="e<日🙂", max_size=4), text=st.text(alphabet="heb.<é日🙂", max_size=12), sizes=SIZES)
@example(before="", text="日🙂🙂", sizes=[])
@example(before="🙂🙂", text="🙂", sizes=[])
def test_characters_of_several_tokens_are_whole_however_many_come_at_once(
    before: str, text: str, sizes: list[int]
) -> None:
    prompt = SPLIT_BYTES.encode("hello" + before)
    output = SPLIT_BYTES.encode("hello" + before + text)[len(prompt) :]

    assert "".join(streamed(DetokenizerFactory(SPLIT_BYTES), prompt, output, sizes)) == text


@pytest.mark.parametrize("silent", SILENT[PIECES])
def test_tokens_without_text_cost_the_same_however_many_came_before(silent: str | int) -> None:
    token = silent if isinstance(silent, int) else PIECES.token_id(silent)
    sizes: list[int] = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return PIECES.decode(token_ids)

    detokenizer = WindowDetokenizer(decode, [1])
    for _ in range(500):
        assert detokenizer.push([token]) == ""
        assert not detokenizer.is_incomplete
    assert detokenizer.push([2]) == "ner"
    assert max(sizes) < 40


def test_tabulated_tokenizers_do_not_ask_the_library_while_streaming() -> None:
    assert isinstance(BYTE_LEVEL_FACTORY.make([1]), ByteDetokenizer)
    assert isinstance(SENTENCEPIECE_FACTORY.make([1]), ByteDetokenizer)


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    emoji = BYTE_LEVEL.encode("🙂")
    detokenizer = BYTE_LEVEL_FACTORY.make([1])

    assert detokenizer.push(emoji[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_silent_unless_they_are_asked_for() -> None:
    end = BYTE_LEVEL.token_id(EOS)
    assert end is not None

    assert BYTE_LEVEL_FACTORY.make([1]).push([end]) == ""
    assert BYTE_LEVEL_FACTORY.make([1], skip_special_tokens=False).push([end]) == EOS
