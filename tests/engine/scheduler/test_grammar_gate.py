"""F1: a request waits while its grammar compiles, and no other request waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from engine.contract.config import CacheConfig, SchedulerConfig
from engine.contract.errors import RequestRefusedError
from engine.contract.grammar import GRAMMAR_REFUSED, CompiledGrammar, GrammarFailure, RowFailure
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.step import EMPTY_INTS, ModelRunnerOutput
from engine.contract.token_ids import TokenIds
from engine.scheduler.policy.grammar_gate import COMPILE_TIMEOUT_S
from engine.scheduler.scheduler import Scheduler
from tests.support.clock import ManualClock

END = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    text: str


@dataclass(slots=True)
class HandCompiler:
    """Implements ``GrammarCompiler``: a grammar is compiled when the test says so."""

    found: dict[str, CompiledGrammar | GrammarFailure] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    num_ended: int = 0
    on_end: None = None

    def poll(self, grammar: str, *, owner: str = "") -> CompiledGrammar | GrammarFailure | None:
        self.asked.append(grammar)
        self.owners[grammar] = owner
        return self.found.get(grammar)

    def announce(self, grammar: str, *, owner: str) -> None:
        self.asked.append(grammar)

    def give_up(self, grammar: str) -> None:
        self.given_up.append(grammar)

    def end(self, grammar: str, failure: str = "") -> None:
        self.found[grammar] = GrammarFailure(failure) if failure else Compiled(grammar)
        self.num_ended += 1


def request(name: str, grammar: str | None = None, **sampling: object) -> GenerateRequest:
    params = {"max_tokens": 4, "eos_token_ids": (END,), "grammar": grammar, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of([1, 2, 3]),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


class Rig:
    """A scheduler whose steps sample token 9."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.compiler = HandCompiler()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, watermark=0.0),
            CacheConfig(block_size=4),
            num_blocks=32,
            max_model_len=64,
            clock=self.clock,
            grammars=self.compiler,
        )
        self.ended: dict[str, tuple[FinishReason, str]] = {}
        self.tokens: dict[str, int] = {}

    def step(self, failures: tuple[RowFailure, ...] = ()) -> list[str]:
        """The requests that got a token."""
        output = self.scheduler.schedule()
        sampled = EMPTY_INTS.copy()
        sampled.resize(int(output.num_samples.sum()), refcheck=False)
        sampled[:] = 9
        result = self.scheduler.update(output, ModelRunnerOutput(sampled, failures=failures))
        heard: list[str] = []
        for delta in result.deltas():
            self.tokens[delta.request_id] = self.tokens.get(delta.request_id, 0) + len(delta.token_ids)
            if delta.token_ids:
                heard.append(delta.request_id)
            if delta.finish_reason is not None:
                code = delta.error.code if delta.error is not None else ""
                self.ended[delta.request_id] = delta.finish_reason, code
        self.scheduler.check_integrity()
        return heard


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.behaviour("F1")
def test_f1_others_pass_a_request_whose_grammar_compiles(rig: Rig) -> None:
    rig.scheduler.add_request(request("slow", "g"))
    rig.scheduler.add_request(request("other"))

    assert rig.step() == ["other"]
    assert rig.scheduler.stats().num_waiting == 1
    rig.compiler.end("g")

    assert sorted(rig.step()) == ["other", "slow"]
    assert rig.scheduler.stats().num_waiting == 0


@pytest.mark.behaviour("F1")
def test_f1_many_that_wait_for_grammars_are_in_nobodys_way(rig: Rig) -> None:
    """Neither rows, nor blocks, nor the places that a step looks behind."""
    for number in range(200):
        rig.scheduler.add_request(request(f"slow {number}", f"g{number}"))
    rig.scheduler.add_request(request("other"))

    assert rig.step() == ["other"]


@pytest.mark.behaviour("F1")
def test_f1_an_engine_at_rest_is_woken_by_a_grammar_and_is_not_stuck_before(rig: Rig) -> None:
    rig.scheduler.add_request(request("slow", "g"))
    rig.step()
    assert not rig.scheduler.has_work()
    assert not rig.scheduler.is_stuck()

    rig.compiler.end("g")

    assert rig.scheduler.has_work()


@pytest.mark.behaviour("F1")
def test_f1_a_compiled_grammar_is_not_waited_for(rig: Rig) -> None:
    rig.compiler.end("g")
    rig.scheduler.add_request(request("a", "g"))

    assert rig.step() == ["a"]


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("is_known", [False, True])
def test_f1_a_grammar_that_cannot_be_compiled_ends_its_request_alone(rig: Rig, is_known: bool) -> None:
    if is_known:
        rig.compiler.end("bad", "it is wrong")
    rig.scheduler.add_request(request("a", "bad"))
    rig.scheduler.add_request(request("b"))
    rig.step()
    if not is_known:
        rig.compiler.end("bad", "it is wrong")

    rig.step()

    assert rig.ended == {"a": (FinishReason.ERROR, GRAMMAR_REFUSED)}
    assert rig.tokens["b"] == 2


@pytest.mark.behaviour("F1")
def test_f1_nobody_waits_for_a_grammar_for_ever(rig: Rig) -> None:
    rig.scheduler.add_request(request("a", "endless"))
    rig.step()
    assert rig.scheduler.idle_timeout_s() == COMPILE_TIMEOUT_S

    rig.clock.advance(COMPILE_TIMEOUT_S)

    assert rig.scheduler.has_work()
    rig.step()
    assert rig.ended == {"a": (FinishReason.ERROR, GRAMMAR_REFUSED)}


@pytest.mark.behaviour("F1")
def test_f1_who_waits_for_a_grammar_can_be_aborted_and_moved(rig: Rig) -> None:
    rig.scheduler.add_request(request("a", "g"))
    rig.scheduler.add_request(request("b", "g"))

    rig.scheduler.abort("a")
    rig.step()
    rig.scheduler.move_out()
    rig.step()

    assert {name: reason for name, (reason, _) in rig.ended.items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.HANDED_OVER,
    }
    assert not rig.scheduler.has_unfinished()


@pytest.mark.behaviour("F1")
def test_f1_a_grammar_that_nobody_waits_for_any_more_is_given_up(rig: Rig) -> None:
    rig.scheduler.add_request(replace(request("a", "shared"), owner="one"))
    rig.scheduler.add_request(replace(request("b", "shared"), owner="two"))
    rig.scheduler.add_request(request("c", "late"))
    assert rig.compiler.owners["late"] == ""
    rig.scheduler.abort("a")
    assert rig.compiler.given_up == [], "another request waits for it"

    rig.scheduler.abort("b")
    assert rig.compiler.given_up == ["shared"]
    rig.clock.advance(COMPILE_TIMEOUT_S)
    rig.step()
    assert rig.compiler.given_up == ["shared", "late"]
    rig.compiler.end("fine")
    rig.scheduler.add_request(request("d", "fine"))
    rig.step()
    assert rig.compiler.given_up == ["shared", "late"], "it was compiled"


@pytest.mark.behaviour("F1")
def test_f1_a_preempted_request_keeps_its_grammar(rig: Rig) -> None:
    rig.compiler.end("g")
    rig.scheduler.add_request(request("a", "g"))
    rig.step()
    rig.compiler.found.clear()
    rig.scheduler.reset_prefix_cache(preempt_running=True)

    rig.step()
    rig.step()

    assert rig.tokens["a"] >= 2


@pytest.mark.behaviour("F1")
def test_f1_a_row_that_cannot_go_on_ends_without_its_token(rig: Rig) -> None:
    rig.compiler.end("g")
    rig.scheduler.add_request(request("a", "g"))
    rig.scheduler.add_request(request("b"))
    rig.step()

    rig.step((RowFailure(0, "nothing fits"),))

    assert rig.ended == {"a": (FinishReason.ERROR, "grammar_failed")}
    assert rig.tokens == {"a": 1, "b": 2}


@pytest.mark.behaviour("F1")
def test_f1_a_grammar_needs_an_end_and_a_compiler(rig: Rig) -> None:
    with pytest.raises(RequestRefusedError, match="end-of-sequence"):
        rig.scheduler.add_request(request("a", "g", eos_token_ids=()))
    plain = Scheduler(SchedulerConfig(max_num_seqs=4), CacheConfig(block_size=4), num_blocks=600, max_model_len=64)
    with pytest.raises(RequestRefusedError, match="has no compiler for grammars"):
        plain.add_request(request("a", "g"))
