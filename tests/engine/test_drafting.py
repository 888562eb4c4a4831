"""F3: draft tokens change no token, whoever proposes them and wherever they are verified.

The engines here have no model (``ChainRunner``): one that reads a wrong token or a wrong block says something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.config import SchedulerConfig
from engine.contract.messages import DraftCounts, FinishReason, GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.drafting.proposer import Drafting
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate, run_requests
from kv_transfer.connector import ConnectorBuilder
from tests.support.engine.chain_engine import DEFAULT_SCHEDULER, chain_engine
from tests.support.engine.chain_runner import ChainRunner, expected_tokens
from tests.support.engine.disaggregated import generate_disaggregated, joined_cores
from tests.support.engine.proposers import SometimesRight, repeat_last
from tests.support.engine.requests import greedy_request

MAX_MODEL_LEN = 128


def drafts(max_draft_tokens: int, accuracy: float, *, proposes_all: bool = False) -> Drafting:
    """Drafts that are right with a probability."""
    proposer = SometimesRight(
        lambda _, tokens: expected_tokens(tokens, 1)[0], probability=accuracy, proposes_all=proposes_all
    )
    return Drafting(proposer=proposer, max_draft_tokens=max_draft_tokens)


def num_steps(core: EngineCore) -> int:
    assert isinstance(core.runner, ChainRunner)
    return core.runner.num_steps


@pytest.mark.behaviour("F3")
def test_f3_right_drafts_save_steps() -> None:
    """Five tokens a step: four drafts and the token after them."""
    core = chain_engine(drafting=drafts(4, 1.0, proposes_all=True))

    deltas = list(run_requests(core, [greedy_request("a", [1, 2, 3], max_tokens=16)]))

    assert [len(delta.token_ids) for delta in deltas] == [1, 5, 5, 5]
    assert [token for delta in deltas for token in delta.token_ids] == expected_tokens([1, 2, 3], 16)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert num_steps(core) <= 5, "the last one only tells of the row that was given up"


@pytest.mark.behaviour("F3", "C13")
def test_f3_drafts_of_each_request_are_told_to_who_sent_it() -> None:
    core = chain_engine(drafting=drafts(4, 0.7, proposes_all=True))
    for name in ("a", "b"):
        core.add_request(replace(greedy_request(name, [1, 2, 3], max_tokens=30), client_id=f"of {name}"))
    counts: dict[str, list[int]] = {"a": [0, 0], "b": [0, 0]}

    while core.has_work():
        for client_id, told in core.step().told_by_client().items():
            for item in told:
                assert isinstance(item, DraftCounts)
                assert client_id == f"of {item.request_id}"
                of_request = counts[item.request_id]
                of_request[0] += item.num_drafts
                of_request[1] += item.num_accepted

    counters = core.stats().scheduler
    assert [sum(pair) for pair in zip(*counts.values(), strict=True)] == [
        counters.num_draft_tokens,
        counters.num_accepted_draft_tokens,
    ]
    assert all(0 < accepted < 30 for _, accepted in counts.values())


@pytest.mark.behaviour("F3")
def test_f3_who_runs_ahead_drafts_nothing_unless_it_was_told_to() -> None:
    assert SchedulerConfig().runs_ahead("cuda")
    assert not SchedulerConfig().runs_ahead("cuda", has_drafts=True)
    assert SchedulerConfig(async_scheduling=True).runs_ahead("cpu", has_drafts=True)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; its output ends with its ``stop_at``-th token, or earlier if that occurs before; 0: by length."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_at: int
    min_tokens: int

    def request(self, request_id: str) -> GenerateRequest:
        tokens = expected_tokens(self.prompt, self.max_tokens)
        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            stop_token_ids=tuple(tokens[: self.stop_at][-1:]),
        )
        return GenerateRequest(request_id=request_id, prompt_token_ids=TokenIds.of(self.prompt), sampling=sampling)


ASKS = st.lists(
    st.builds(
        Ask,
        prompt=st.sampled_from([tuple([stem] * length) for stem in (1, 2) for length in (1, 4, 9, 23)]),
        max_tokens=st.integers(1, 30),
        stop_at=st.sampled_from([0, 0, 1, 5, 14]),
        min_tokens=st.sampled_from([0, 0, 7]),
    ),
    min_size=1,
    max_size=6,
)
DRAFTS = st.builds(drafts, st.sampled_from([3, 1, 8]), st.sampled_from([0.7, 0.0, 1.0])) | st.just(repeat_last(3))


@settings(max_examples=80, deadline=None)
@given(
    asks=ASKS,
    drafting=DRAFTS,
    num_blocks=st.sampled_from([64, 20, 16]),
    budget=st.sampled_from([16, 64]),
    runs_ahead=st.booleans(),
)
@pytest.mark.behaviour("F3")
def test_f3_one_engine_says_the_same_with_drafts(
    asks: list[Ask], drafting: Drafting, num_blocks: int, budget: int, runs_ahead: bool
) -> None:
    scheduler = replace(DEFAULT_SCHEDULER, max_num_batched_tokens=budget, async_scheduling=runs_ahead)
    requests = [ask.request(str(number)) for number, ask in enumerate(asks)]
    plain = chain_engine(num_blocks=num_blocks, scheduler=scheduler)
    drafted = chain_engine(num_blocks=num_blocks, scheduler=scheduler, drafting=drafting)

    expected, actual = generate(plain, requests), generate(drafted, requests)

    assert actual == expected
    assert drafted.stats().scheduler.num_generated_tokens >= plain.stats().scheduler.num_generated_tokens
    load = drafted.load_report()
    assert load.num_free_blocks == load.num_blocks


@settings(max_examples=60, deadline=None)
@given(asks=ASKS, drafting=DRAFTS)
@pytest.mark.behaviour("F3")
def test_f3_prefill_and_decode_say_the_same_with_drafts(asks: list[Ask], drafting: Drafting) -> None:
    requests = [ask.request(str(number)) for number, ask in enumerate(asks)]

    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return chain_engine(build_connector=build_connector, drafting=drafting)

    with joined_cores(build, build) as (prefill, decode):
        outputs = generate_disaggregated(prefill, decode, requests)

    assert outputs == generate(chain_engine(), requests)
