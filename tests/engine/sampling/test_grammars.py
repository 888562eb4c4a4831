"""F1: the tokens that a row's grammar allows, derived from its tokens alone, whatever else its request asks for."""

from __future__ import annotations

import gc
from pathlib import Path
from threading import Event, Semaphore

import numpy as np
import pytest
import torch

from engine.contract.grammar import GrammarFailure
from engine.contract.messages import SamplingParams
from engine.sampling.grammar.compiler import Grammar, GrammarStore
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory
from router.grammar.grammar_text import GrammarText
from tests.support.cluster.served_checkpoint import byte_tokenizer
from tests.support.grammar.long_chains import long_chains

VOCAB_SIZE = 300
"""More than the tokenizer's 259: models pad."""

END = 2
TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def lark(body: str) -> str:
    return f"start: {body}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(str(path / "tokenizer.json"))
    return path


def make_store(folder: Path, *, max_num_kept: int = 99) -> GrammarStore:
    return GrammarStore(folder, vocab_size=VOCAB_SIZE, eos_token_ids=(END,), max_num_kept=max_num_kept)


def compiled(store: GrammarStore, text: str) -> Grammar | GrammarFailure:
    ended = Event()
    store.on_end = ended.set
    while (found := store.poll(text)) is None:
        assert ended.wait(120)
        ended.clear()
    return found


def test_whoever_is_told_that_a_compilation_ended_finds_the_grammar(folder: Path) -> None:
    """Looked up once and not again until the next news, a grammar that came a moment later would be waited for."""
    store = make_store(folder)
    found: list[Grammar | GrammarFailure | None] = []
    told = Event()

    def look() -> None:
        found.append(store.poll(lark('"a"')))
        told.set()

    store.on_end = look
    assert store.poll(lark('"a"')) is None

    assert told.wait(120)
    assert isinstance(found[0], Grammar)


class Rig:
    """A sampler whose rows hold their grammars."""

    def __init__(self, folder: Path) -> None:
        self.store = make_store(folder)
        self.held: list[Grammar | GrammarFailure] = []
        self.rows = SamplingRows(8, grammars=self.store)
        self.history = TokenHistory(
            token_ids=np.zeros((8, 64), dtype=np.int32), num_prompt_tokens=np.zeros(8, dtype=np.int32)
        )
        self.lengths = np.zeros(8, dtype=np.int32)
        self.sampler = Sampler(self.rows, self.history, may_wait=True)

    def set(self, row: int, grammar: str | None, output: str = "", **fields: object) -> None:
        if grammar is not None:
            self.held.append(compiled(self.store, grammar))
        sampling = SamplingParams(max_tokens=9, eos_token_ids=(END,), grammar=grammar, **fields)  # type: ignore[arg-type]
        tokens = [50, 51, *ids(output)]
        self.history.token_ids[row, : len(tokens)] = tokens
        self.history.num_prompt_tokens[row] = 2
        self.lengths[row] = len(tokens)
        self.rows.set(row, sampling, num_prompt_tokens=2)

    def sample(self, *rows: int, logits: torch.Tensor | None = None, begins: bool = False) -> SampledTokens:
        index = np.array(rows, dtype=np.int32)
        return self.sample_at(index, self.lengths[index], logits, begins=begins)

    def sample_at(
        self,
        rows: np.ndarray[tuple[int], np.dtype[np.int32]],
        positions: np.ndarray[tuple[int], np.dtype[np.int32]],
        logits: torch.Tensor | None = None,
        *,
        begins: bool = False,
    ) -> SampledTokens:
        if begins:
            self.sampler.begin(rows, positions)
        return self.sampler.sample(torch.zeros(len(rows), VOCAB_SIZE) if logits is None else logits, rows, positions)

    def next_text(self, row: int) -> str:
        """The next text of a model without preferences: the first allowed token."""
        return str(TOKENIZER.decode(self.sample(row).token_ids.tolist(), skip_special_tokens=False))

    def say(self, row: int, limit: int = 20) -> str:
        """An output, token by token; "." represents its end."""
        said = ""
        for _ in range(limit):
            token = int(self.sample(row).token_ids[0])
            if token == END:
                return said + "."
            self.history.token_ids[row, self.lengths[row]] = token
            self.lengths[row] += 1
            said += str(TOKENIZER.decode([token]))
        return said


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


@pytest.mark.behaviour("F1")
def test_f1_an_output_follows_its_grammar_and_ends_with_it(rig: Rig) -> None:
    rig.set(0, lark('"yes"'))

    assert rig.say(0) == "yes."


@pytest.mark.behaviour("F1")
def test_f1_rows_without_a_grammar_are_left_alone(rig: Rig) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 280] = 5.0
    rig.set(0, None)
    rig.set(1, lark('"b"'))

    assert rig.sample(0, 1, logits=logits).token_ids.tolist() == [280, *ids("b")]
    rig.set(1, None)
    assert rig.sample(0, 1, logits=logits).token_ids.tolist() == [280, 280]


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("begins", [False, True])
def test_f1_state_is_made_from_the_tokens_whoever_sampled_them(rig: Rig, begins: bool) -> None:
    """A row that begins with output, as after a hand-over or a preemption, continues where it was."""
    for row, output in enumerate(["", "a", "ab", "abc"]):
        rig.set(row, lark('"abcd"'), output)

    assert rig.sample(0, 1, 2, 3, begins=begins).token_ids.tolist() == ids("abcd")
    assert rig.sample(0, 1, 2, 3, begins=begins).token_ids.tolist() == ids("abcd"), "asked twice, told twice"


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("drafts", "expected"), [("bcd", "bcd."), ("bxd", "bc"), ("zzz", "b"), ("bc", "bcd"), ("", "b")]
)
def test_f1_each_draft_is_followed_as_far_as_it_fits_and_taken_back(rig: Rig, drafts: str, expected: str) -> None:
    rig.set(0, lark('"abcd"'), "a")
    rig.history.token_ids[0, 3 : 3 + len(drafts)] = ids(drafts)
    rows, positions = np.zeros(len(drafts) + 1, np.int32), np.arange(3, 4 + len(drafts), dtype=np.int32)

    for _ in range(2):
        said = rig.sample_at(rows, positions, begins=True).token_ids.tolist()
        wanted = [END if character == "." else ids(character)[0] for character in expected]
        assert said[: len(wanted)] == wanted

    assert rig.next_text(0) == "b"


@pytest.mark.behaviour("F1")
def test_f1_the_grammar_holds_before_min_tokens_ignore_eos_and_bad_words(rig: Rig) -> None:
    rig.set(0, lark("/a{1,3}/"), min_tokens=9, ignore_eos=True)
    rig.set(1, lark('"ab"'), bad_words=(tuple(ids("ab")), tuple(ids("a"))))
    rig.set(2, lark("/a{1,3}/"), logit_bias=((END, 100.0),))

    assert [rig.say(row) for row in range(3)] == ["aaa.", "ab.", "a."]


@pytest.mark.behaviour("F1")
def test_f1_stop_tokens_may_come_where_the_grammar_may_end(rig: Rig) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 1] = 5.0
    for row, output in enumerate(["", "a"]):
        rig.set(row, lark("/a+/"), output, stop_token_ids=(1,))

    assert rig.sample(0, logits=logits).token_ids.tolist() == ids("a")
    assert rig.sample(1, logits=logits).token_ids.tolist() == [1]


@pytest.mark.behaviour("F1")
def test_f1_allowed_tokens_and_grammar_hold_together_and_a_dead_end_is_told(rig: Rig) -> None:
    allowed = tuple(ids("ax"))
    rig.set(0, lark("/[abc]a/"), allowed_token_ids=allowed)
    rig.set(1, lark("/[bc]/"), allowed_token_ids=allowed)

    assert rig.say(0) == "aa.", "an output that is complete ends, whether its end is allowed or not"
    failures = rig.sample(1).failures
    assert [(failure.row, "allowed_token_ids" in failure.message) for failure in failures] == [(1, True)]


@pytest.mark.behaviour("F1")
def test_f1_an_output_that_does_not_fit_is_told_and_not_gone_on_with(rig: Rig) -> None:
    rig.set(0, lark('"abc"'), "ax")

    assert [failure.row for failure in rig.sample(0).failures] == [0]
    assert [failure.row for failure in rig.sample(0).failures] == [0]


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("grammar", "output", "words"),
    [("/b?(a{1000}){1000}/", "ba", "smaller counts"), ('"abc"', "ax", "the output does not fit")],
)
def test_f1_a_limit_met_on_the_way_is_told_from_an_output_that_does_not_fit(
    rig: Rig, grammar: str, output: str, words: str
) -> None:
    rig.set(0, lark(grammar), output[:1])
    rig.sample(0)
    rig.set(0, lark(grammar), output)

    [failure] = rig.sample(0).failures

    assert words in failure.message
    assert "<non-verbose" not in failure.message


@pytest.mark.behaviour("F1")
def test_f1_logits_of_no_number_follow_the_grammar_too(rig: Rig) -> None:
    rig.set(0, lark('"abc"'), "a")

    assert rig.sample(0, logits=torch.full((1, VOCAB_SIZE), torch.nan)).token_ids.tolist() == ids("b")


@pytest.mark.behaviour("F1")
def test_f1_ids_that_are_no_tokens_are_never_drawn(rig: Rig) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 259:] = 9.0
    rig.set(0, lark("/(.|\\n)*/"))

    assert int(rig.sample(0, logits=logits).token_ids[0]) < 259


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("seed", range(4))
def test_f1_what_is_beside_a_row_and_how_it_is_searched_changes_no_token(rig: Rig, seed: int) -> None:
    """Greedy rows are searched in place, others in copies; where nothing may wait for logits, all of them in copies."""
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logits[7, 100], logits[3, 40] = torch.nan, torch.inf
    word = lark("/[a-z]{1,8}/")
    rig.set(0, word)
    rig.set(1, word, temperature=1.5, top_k=4, seed=9)
    rig.set(2, None)
    rig.set(3, word, "ab", presence_penalty=2.0)
    rig.set(4, lark('"a"'), "a", allowed_token_ids=tuple(ids("x")))
    rig.set(5, None, temperature=0.7, seed=3)
    rig.set(6, word, "abcdefg", num_logprobs=2)
    rig.set(7, word)
    everything = np.arange(8, dtype=np.int32)
    in_copies = Sampler(rig.rows, rig.history, may_wait=False)

    together = rig.sample_at(everything, rig.lengths, logits).token_ids.tolist()

    assert together == [rig.sample(row, logits=logits[row : row + 1]).token_ids.item() for row in range(8)]
    assert together == in_copies.sample(logits, everything, rig.lengths).token_ids.tolist()


@pytest.mark.behaviour("F1")
def test_f1_a_grammar_is_compiled_once_and_shared(folder: Path) -> None:
    store = make_store(folder)

    first, second = compiled(store, lark('"a"')), compiled(store, lark('"a"'))

    assert first is second
    assert store.num_ended == 1
    store.close()


@pytest.mark.behaviour("F1")
def test_f1_what_is_kept_is_bounded_and_what_is_held_stays(folder: Path) -> None:
    store = make_store(folder, max_num_kept=2)
    held = compiled(store, lark('"a0"'))
    for number in range(1, 5):
        compiled(store, lark(f'"a{number}"'))

    assert compiled(store, lark('"a0"')) is held
    assert store.num_ended == 5
    compiled(store, lark('"a1"'))
    assert store.num_ended == 6, "nobody held it, and it was not kept"
    store.close()


@pytest.mark.behaviour("F1")
def test_f1_what_is_kept_is_bounded_in_bytes(folder: Path) -> None:
    text = lark('"' + "é" * 100 + '"')
    store = GrammarStore(folder, vocab_size=VOCAB_SIZE, eos_token_ids=(END,), max_kept_bytes=150)
    assert isinstance(compiled(store, text), Grammar)

    compiled(store, text)

    assert store.num_ended == 2, "its letters would have fitted, its bytes do not"
    store.close()


@pytest.mark.behaviour("F1")
def test_f1_grammars_that_nobody_asks_for_again_are_bounded_too(folder: Path) -> None:
    """Those whose requests had left by the time they were compiled used to be kept forever."""
    store = make_store(folder, max_num_kept=3)
    ended = Semaphore(0)
    store.on_end = ended.release

    for number in range(20):
        assert store.poll(lark(f'"left {number}"')) is None
        assert ended.acquire(timeout=120)
    store.poll(lark('"last"'))

    assert num_grammars('"left ') <= 6, "three that nobody asked for, and three that are kept"
    assert isinstance(store.poll(lark('"left 19"')), Grammar), "the newest is there"
    store.close()


def num_grammars(beginning: str) -> int:
    gc.collect()
    return sum(type(item) is Grammar and f"start: {beginning}" in item.text for item in gc.get_objects())


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("grammar", ["start: nothing", "no grammar at all", 'start: "a" <|nosuch|>'])
def test_f1_what_cannot_be_compiled_says_why(folder: Path, grammar: str) -> None:
    store = make_store(folder)

    found = compiled(store, grammar)

    assert isinstance(found, GrammarFailure)
    assert "cannot be compiled" in found.message
    store.close()


@pytest.mark.behaviour("F1")
def test_f1_a_grammar_whose_first_mask_costs_too_much_is_refused_with_the_remedy(folder: Path) -> None:
    store = make_store(folder)

    found = compiled(store, lark("/(a{1000}){1000}/"))

    assert isinstance(found, GrammarFailure)
    assert "smaller counts" in found.message
    assert "<non-verbose" not in found.message
    store.close()


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(("grammar", "beginning"), long_chains())
def test_f1_references_as_long_as_a_grammar_may_be_are_followed(
    folder: Path, grammar: GrammarText, beginning: str
) -> None:
    """Compiled in a thread with room for a call within another for each of them; followed in any."""
    store = make_store(folder)

    found = compiled(store, grammar.text)

    assert isinstance(found, Grammar)
    guesses = np.array(ids(beginning), np.int32)
    assert found.new_follower().num_fitting(np.array([], np.int32), guesses) == guesses.size
    store.close()


@pytest.mark.behaviour("F1")
def test_f1_a_checkpoint_without_an_end_or_a_tokenizer_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    endless = GrammarStore(folder, vocab_size=VOCAB_SIZE, eos_token_ids=())
    mute = GrammarStore(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=(END,))

    for store, word in ((endless, "end-of-sequence"), (mute, "tokenizer.json")):
        found = compiled(store, lark('"a"'))
        assert isinstance(found, GrammarFailure)
        assert word in found.message
        store.close()
