"""I1 for layers with windows: disturbances of sixteen streams that are many windows long change no token.

tests/parity does all that a router can do with one such request; here requests meet, and only some of what is loaded
is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.contract.config import EngineConfig
from engine.contract.messages import GenerateRequest
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate
from kv_transfer.fault_options import FaultOptions
from kv_transfer.inproc import InProcessFabric
from kv_transfer.options import ConnectorOptions
from tests.support.engine.disaggregated import CoreBuilder, generate_disaggregated, inproc_builder, joined_cores
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.oracle_cases import NUM_TOKENS, OracleCase
from tests.support.engine.requests import greedy_request

CaseOf = Callable[[str], OracleCase]

FEW_BLOCKS = {"mistral": 150, "qwen2": 400, "gpt_oss": 400}
"""Models with windows, and a cache that does not hold all prompts.

Of the first all layers have a window of 24 tokens; of the others two of three one of 40 or 24: three KV cache groups.
"""

PLAIN = ConnectorOptions(connector="inproc", checksums=True)
TIER_BYTES = 64 * 1024 * 1024


def as_requests(case: OracleCase, prefix: str = "") -> list[GenerateRequest]:
    return [greedy_request(f"{prefix}{n}", prompt, max_tokens=NUM_TOKENS) for n, prompt in enumerate(case.prompts)]


def in_order(outputs: dict[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, outputs.values()))


def assert_at_rest(*cores: EngineCore) -> None:
    for core in cores:
        core.collect()
        core.scheduler.check_integrity()
        load = core.load_report()
        assert load.is_empty
        assert load.num_free_blocks == load.num_blocks


def config_of(case: OracleCase, **scheduler: object) -> EngineConfig:
    config = small_engine_config(case.path, block_size=8)
    return replace(config, scheduler=replace(config.scheduler, **scheduler))  # type: ignore[arg-type]


def builder(config: EngineConfig) -> CoreBuilder:
    return lambda build_connector: build_engine(config, build_connector=build_connector).core


@contextmanager
def tiered_core(path: Path, num_blocks: int, tier: str, folder: Path) -> Iterator[EngineCore]:
    """One engine whose cache is too small for all prompts, before a tier that is not."""
    sizes: dict[str, Any] = {f"{tier}_bytes": TIER_BYTES}
    if tier == "disk":
        sizes["disk_path"] = str(folder)
    options = replace(PLAIN, connector="chain", chain=(tier, "inproc"), **sizes)
    config = small_engine_config(path, block_size=8, num_blocks=num_blocks)
    core = builder(config)(inproc_builder(InProcessFabric(), "engine", options))
    try:
        yield core
    finally:
        core.close()


@pytest.mark.behaviour("B7", "I1")
@pytest.mark.parametrize("architecture", FEW_BLOCKS)
def test_preempted_streams_take_up_their_windows_again(architecture: str, oracle_case: CaseOf) -> None:
    case = oracle_case(architecture)
    config = config_of(case, artificial_preemption_probability=0.3, max_num_artificial_preemptions=60)
    core = build_engine(config).core

    assert in_order(generate(core, as_requests(case))) == case.expected
    assert core.stats().scheduler.num_preemptions > 10
    assert_at_rest(core)


@pytest.mark.behaviour("K4", "I1")
@pytest.mark.parametrize("rate", (0.1, 0.5))
@pytest.mark.parametrize("architecture", FEW_BLOCKS)
def test_damaged_blocks_of_some_groups_are_computed(architecture: str, rate: float, oracle_case: CaseOf) -> None:
    case = oracle_case(architecture)
    options = replace(PLAIN, faults=FaultOptions(seed=5, bit_flips=rate), allow_faults=True)
    build = builder(config_of(case))
    with joined_cores(build, build, options) as (prefill, decode):
        outputs = generate_disaggregated(prefill, decode, as_requests(case))

        assert in_order(outputs) == case.expected
        stats = decode.stats()
        assert 0 < stats.transfer.num_corrupt_blocks < stats.transfer.num_blocks
        assert stats.scheduler.failed_blocks > 0
        assert_at_rest(decode)


@pytest.mark.behaviour("K9", "I1")
@pytest.mark.parametrize("tier", ("host", "disk"))
@pytest.mark.parametrize("architecture", FEW_BLOCKS)
def test_what_was_evicted_of_each_group_comes_back_from_a_tier(
    architecture: str, tier: str, oracle_case: CaseOf, tmp_path: Path
) -> None:
    case = oracle_case(architecture)
    with tiered_core(case.path, FEW_BLOCKS[architecture], tier, tmp_path) as core:
        for turn in range(3):
            assert in_order(generate(core, as_requests(case, f"{turn}-"))) == case.expected

        assert core.stats().transfer.num_blocks > 0
        assert core.stats().scheduler.num_evicted_blocks > 0
        assert_at_rest(core)
