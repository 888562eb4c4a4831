"""B7 in bytes: the KV that a model with windows in five of six layers holds and hands over for long streams.

It is compared with the same model whose layers all see everything, on real engines. Blocks of the two differ in size:
those of the model with windows hold one layer in six. So bytes are compared, not blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.build import build_engine
from engine.contract.config import EngineConfig
from engine.contract.messages import FinishReason, GenerateRequest
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import ConnectorBuilder
from kv_transfer.options import ConnectorOptions
from tests.support.engine.checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint, oracle_greedy
from tests.support.engine.disaggregated import joined_cores, run_disaggregated
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.requests import greedy_request

WINDOW = 64
NUM_TOKENS = 8 * WINDOW
BLOCK_SIZE = 8
MOST_OF_FULL = 0.3
NUM_LAYERS = 6
FULL = ("full_attention",) * NUM_LAYERS
WINDOWED = (*["sliding_attention"] * (NUM_LAYERS - 1), "full_attention")
OUTPUT_TOKENS = 96
"""So many that the first of eight streams still decodes when the last one is computed."""

ModelOf = Callable[[tuple[str, ...]], Path]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """A small Gemma 3 with layers of these types."""
    paths: dict[tuple[str, ...], Path] = {}

    def model(layer_types: tuple[str, ...]) -> Path:
        if layer_types not in paths:
            paths[layer_types] = make_checkpoint(
                tmp_path_factory.mktemp("windows"),
                "gemma3",
                num_hidden_layers=NUM_LAYERS,
                layer_types=list(layer_types),
                sliding_window=WINDOW,
            )
        return paths[layer_types]

    return model


def long_requests(num_requests: int) -> list[GenerateRequest]:
    """Requests of eight windows each and a few tokens more, no two of which begin alike."""
    prompts = (
        [3 + (7 * place + 31 * number + place * place) % (VOCAB_SIZE - 3) for place in range(NUM_TOKENS + number)]
        for number in range(num_requests)
    )
    return [greedy_request(f"r{n}", prompt, max_tokens=OUTPUT_TOKENS) for n, prompt in enumerate(prompts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes of a KV cache that requests hold: the maximum, and after each step in which all decode."""

    most: int
    at_rest: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Bytes of all hand-overs: leased and transferred in sum, and the most that decode held."""

    leased: int
    transferred: int
    most_held: int
    outputs: dict[str, list[int]]


def config_of(path: Path, *, chunk_tokens: int = WINDOW) -> EngineConfig:
    """Steps compute as many tokens as a window has, and so many of a prompt; the cache holds all streams."""
    config = small_engine_config(path, block_size=BLOCK_SIZE, num_blocks=1024, max_num_batched_tokens=WINDOW)
    return replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=chunk_tokens))


def held_bytes(core: EngineCore, block_bytes: int) -> int:
    """The bytes that requests and leases hold now, over all KV cache groups, as in `/status`."""
    return sum(core.load_report().held_blocks_by_group) * block_bytes


def run_alone(path: Path, num_requests: int, chunk_tokens: int) -> HeldBytes:
    """Run streams on one engine until all of them have ended."""
    engine = build_engine(config_of(path, chunk_tokens=chunk_tokens))
    core, block_bytes = engine.core, engine.facts.layout.block_bytes
    for request in long_requests(num_requests):
        core.add_request(request)
    held: list[int] = []
    at_rest: list[int] = []
    while core.has_unfinished():
        core.step()
        core.scheduler.check_integrity()
        held.append(held_bytes(core, block_bytes))
        stats = core.stats().scheduler
        if stats.num_running == num_requests and stats.queued_prefill_tokens == 0:
            at_rest.append(held[-1])
    assert core.stats().scheduler.num_preemptions == 0
    assert held_bytes(core, block_bytes) == 0
    core.close()
    return HeldBytes(most=max(held), at_rest=tuple(at_rest))


def hand_over(path: Path, num_requests: int, options: ConnectorOptions) -> HandOver:
    """Prefill streams on one engine and decode them on another."""
    block_bytes: list[int] = []

    def build(build_connector: ConnectorBuilder) -> EngineCore:
        engine = build_engine(config_of(path), build_connector=build_connector)
        block_bytes.append(engine.facts.layout.block_bytes)
        return engine.core

    outputs: dict[str, list[int]] = {}
    leased, most_held = 0, 0
    with joined_cores(build, build, options) as (prefill, decode):
        for delta in run_disaggregated(prefill, decode, long_requests(num_requests)):
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is FinishReason.HANDED_OVER:
                assert delta.kv_transfer is not None
                leased += sum(map(len, delta.kv_transfer.block_ids))
            most_held = max(most_held, held_bytes(decode, block_bytes[1]))
        transfer = decode.stats().transfer
        assert transfer.num_bytes == transfer.num_blocks * block_bytes[1]
        assert held_bytes(prefill, block_bytes[0]) == held_bytes(decode, block_bytes[1]) == 0
    return HandOver(
        leased=leased * block_bytes[0], transferred=transfer.num_bytes, most_held=most_held, outputs=outputs
    )


def assert_saves(windowed: int, full: int) -> None:
    """Not more than the share, and not nothing: no less than what the one layer holds that sees everything."""
    assert full // NUM_LAYERS < windowed <= MOST_OF_FULL * full


@pytest.mark.behaviour("B7")
@pytest.mark.parametrize(
    "num_requests, chunk_tokens",
    ((1, BLOCK_SIZE), (8, BLOCK_SIZE), (8, WINDOW)),
    ids=("one-stream", "all-at-the-same-place", "one-after-another"),
)
def test_five_windowed_layers_in_six_hold_less_than_a_third(
    num_requests: int, chunk_tokens: int, model_of: ModelOf
) -> None:
    """At eight windows a stream. A group holds its window and the chunk being computed: the chunks count under load."""
    windowed = run_alone(model_of(WINDOWED), num_requests, chunk_tokens)
    full = run_alone(model_of(FULL), num_requests, chunk_tokens)

    assert_saves(windowed.most, full.most)
    assert all((windowed.at_rest, full.at_rest)), "all streams decode at once"
    # How many steps that is depends on how fast this machine computes prompts: the first and the last are compared.
    assert_saves(min(windowed.at_rest), min(full.at_rest))
    assert_saves(max(windowed.at_rest), max(full.at_rest))


@pytest.mark.behaviour("B7")
@pytest.mark.parametrize("streamed", (False, True), ids=("at-the-end", "streamed"))
@pytest.mark.parametrize("num_requests", (1, 8), ids=("one-stream", "under-load"))
def test_five_windowed_layers_in_six_hand_over_less_than_a_third(
    num_requests: int, streamed: bool, model_of: ModelOf
) -> None:
    options = ConnectorOptions(connector="inproc", checksums=True, streamed=streamed)

    windowed = hand_over(model_of(WINDOWED), num_requests, options)
    full = hand_over(model_of(FULL), num_requests, options)

    assert_saves(windowed.leased, full.leased)
    assert_saves(windowed.transferred, full.transferred)
    assert_saves(windowed.most_held, full.most_held)


@pytest.mark.behaviour("B7", "I1")
def test_what_was_handed_over_is_enough(model_of: ModelOf) -> None:
    path = model_of(WINDOWED)
    requests = long_requests(2)
    oracle = load_oracle(path)
    expected = {
        request.request_id: oracle_greedy(oracle, list(request.prompt_token_ids), OUTPUT_TOKENS) for request in requests
    }

    assert hand_over(path, 2, ConnectorOptions(connector="inproc")).outputs == expected
