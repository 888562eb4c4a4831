"""A runner with decode graphs samples the tokens of one without, whatever runs together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.contract.config import CacheConfig, EngineConfig, GPUConfig, ModelConfigSource, SchedulerConfig
from engine.contract.errors import ConfigError
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.drafting.proposer import Drafting
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate
from engine.runner.model_runner import ModelRunner
from engine.scheduler.scheduler import Scheduler
from tests.support.attention.fake_graph_device import FakeGraphDevice
from tests.support.engine.checkpoints import ARCHITECTURES, VOCAB_SIZE
from tests.support.engine.proposers import Recorded, SometimesRight
from tests.support.engine.step_driver import GREEDY, StepDriver

CheckpointMaker = Callable[[str], Path]
NUM_BLOCKS = 64
MAX_NUM_SEQS = 6
RANDOM = SamplingParams(max_tokens=100, temperature=1.0, top_p=0.95, seed=1234)


def _config(path: Path, gpu: GPUConfig) -> EngineConfig:
    return EngineConfig(
        model=ModelConfigSource(path=path, device="cpu", dtype="float32"),
        cache=CacheConfig(num_blocks=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=128),
        gpu=gpu,
    )


def _run(runner: ModelRunner) -> list[dict[int, int]]:
    """Rows come, decode together with others' prefills and without, and go: five, three, four, one at a time."""
    driver = StepDriver(runner, seed=1)
    rng = np.random.default_rng(5)
    for row, length in enumerate((33, 7, 50, 1, 18)):
        driver.add(row, rng.integers(0, VOCAB_SIZE, length).tolist(), sampling=RANDOM if row == 1 else GREEDY)
    steps = [driver.step({0: 33, 1: 7, 2: 20, 3: 1, 4: 18}), driver.step({0: 1, 1: 1, 2: 30, 3: 1, 4: 1})]
    steps += [driver.step({2: 1, 0: 1, 3: 1, 1: 1, 4: 1}) for _ in range(3)]
    driver.release(3)
    driver.release(1)
    steps += [driver.step({0: 1, 2: 1, 4: 1}) for _ in range(2)]
    driver.add(1, rng.integers(0, VOCAB_SIZE, 40).tolist())
    steps += [driver.step({1: 40, 0: 1})]
    steps += [driver.step(dict.fromkeys((4, 1, 0, 2), 1)) for _ in range(2)]
    steps += [driver.step({2: 1}) for _ in range(2)]
    return steps


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_tokens_with_graphs_and_without(checkpoint: CheckpointMaker, architecture: str) -> None:
    device = FakeGraphDevice()
    path = checkpoint(architecture)
    runner = ModelRunner(_config(path, GPUConfig()), parts=device.parts())
    assert runner.graph_sizes == (1, 2, 4, 6)
    plain = ModelRunner(_config(path, GPUConfig(cuda_graphs=False)), parts=device.parts())
    assert plain.graph_sizes == ()

    steps = _run(runner)

    assert steps == _run(plain)
    assert device.num_replays == {6: 3, 4: 4, 1: 2}


@pytest.mark.behaviour("F5")
def test_f5_same_tokens_when_a_step_is_launched_before_the_last_is_known(
    checkpoint: CheckpointMaker,
) -> None:
    device = FakeGraphDevice()
    path = checkpoint("llama")
    rng = np.random.default_rng(5)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=TokenIds.of(rng.integers(3, VOCAB_SIZE, length).tolist()),
            sampling=dataclasses.replace(RANDOM if number == 1 else GREEDY, max_tokens=6 + number),
        )
        for number, length in enumerate((33, 7, 50, 1))
    ]
    ahead = _core(ModelRunner(_config(path, GPUConfig()), parts=device.parts()), runs_ahead=True)
    plain = _core(ModelRunner(_config(path, GPUConfig(cuda_graphs=False)), parts=device.parts()), runs_ahead=False)

    outputs = generate(ahead, requests)

    assert outputs == generate(plain, requests)
    assert sum(device.num_replays.values()) >= 6


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_f3_steps_that_verify_drafts_are_graphs_too(checkpoint: CheckpointMaker, architecture: str) -> None:
    """A request with drafts has a row of the graph for each token that it computes, in windows as well."""
    device, path, rng = FakeGraphDevice(), checkpoint(architecture), np.random.default_rng(6)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=TokenIds.of(rng.integers(3, VOCAB_SIZE, length).tolist()),
            sampling=dataclasses.replace(RANDOM if number == 1 else GREEDY, max_tokens=30 + number),
        )
        for number, length in enumerate((33, 7, 50))
    ]
    plain = _core(ModelRunner(_config(path, GPUConfig(cuda_graphs=False)), parts=device.parts()))
    expected = generate(plain, requests)
    record = Recorded()
    for request in requests:
        record.add([*request.prompt_token_ids, *expected[request.request_id]])
    drafting = Drafting(proposer=SometimesRight(record, probability=0.8), max_draft_tokens=4)
    runner = ModelRunner(_config(path, GPUConfig()), parts=device.parts(), max_samples=drafting.most_samples(3))
    drafted = _core(runner, drafting=drafting)

    outputs = generate(drafted, requests)

    assert outputs == expected
    assert runner.graph_sizes == (1, 2, 4, 8, 15)
    assert device.num_replays[15] > 0
    counters = drafted.stats().scheduler
    assert 0 < counters.num_accepted_draft_tokens < counters.num_draft_tokens


def _core(runner: ModelRunner, *, runs_ahead: bool = False, drafting: Drafting | None = None) -> EngineCore:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
        CacheConfig(num_blocks=NUM_BLOCKS),
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        windows=[group.window for group in runner.layout.groups],
        drafting=drafting,
    )
    return EngineCore(scheduler=scheduler, runner=runner, runs_ahead=runs_ahead)


def test_scratch_block_is_nobodys(checkpoint: CheckpointMaker) -> None:
    runner = ModelRunner(_config(checkpoint("llama"), GPUConfig()), parts=FakeGraphDevice().parts())
    assert runner.num_blocks == runner.region.num_blocks == NUM_BLOCKS
    assert len(runner.kv_cache.blocks) == NUM_BLOCKS + 1
    assert not runner.kv_cache.blocks[:NUM_BLOCKS].any()


def test_larger_batches_than_the_bound_run_without(checkpoint: CheckpointMaker) -> None:
    device = FakeGraphDevice()
    runner = ModelRunner(_config(checkpoint("llama"), GPUConfig(max_graph_batch_size=3)), parts=device.parts())
    _run(runner)
    assert runner.graph_sizes == (1, 2, 3)
    assert device.num_replays == {3: 2, 1: 2}


def test_a_runner_whose_kernel_does_not_page_goes_on_without(checkpoint: CheckpointMaker) -> None:
    device = FakeGraphDevice()
    path = checkpoint("llama")
    runner = ModelRunner(_config(path, GPUConfig()), parts=device.parts(block_multiple=256))
    assert runner.graph_sizes == ()
    assert _run(runner) == _run(ModelRunner(_config(path, GPUConfig())))


def test_few_requests_with_many_drafts_have_graphs_of_so_many_rows(checkpoint: CheckpointMaker) -> None:
    path, parts = checkpoint("llama"), FakeGraphDevice().parts()

    bounded = ModelRunner(_config(path, GPUConfig()), parts=parts, max_samples=1000)
    told = ModelRunner(_config(path, GPUConfig(max_graph_batch_size=10)), parts=parts, max_samples=1000)

    assert (bounded.graph_sizes[-1], told.graph_sizes[-1]) == (128, 10)


def test_required_graphs_on_a_device_without_them_are_refused(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.cuda_graphs is true, but the device is cpu; set it to auto or false"):
        ModelRunner(_config(checkpoint("llama"), GPUConfig(cuda_graphs=True)))
