"""The runner samples the tokens that transformers generates, however the work is cut up and whoever runs beside it."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.errors import CheckpointError, ConfigError
from engine.contract.messages import SamplingParams
from engine.contract.step import EMPTY_INTS, SchedulerOutput
from engine.model.builtin import builtin_model_dir
from engine.model.registry import load_model_config
from engine.runner.device import choose_device, choose_dtype
from engine.runner.model_runner import ModelRunner
from kv_transfer.cache_groups import ABSENT_BLOCK
from kv_transfer.layout import MemoryKind
from tests.support.engine.cache_blocks import read_block, write_block
from tests.support.engine.checkpoints import (
    ARCHITECTURES,
    MAX_POSITION_EMBEDDINGS,
    VOCAB_SIZE,
    load_oracle,
    make_checkpoint,
    oracle_greedy,
)
from tests.support.engine.step_driver import GREEDY, StepDriver

NUM_TOKENS = 24
RANDOM = SamplingParams(max_tokens=100, temperature=1.0, top_p=0.95, seed=1234, repetition_penalty=1.1)


def _runner(
    path: Path, *, dtype: DTypeName = "float32", block_size: int = 16, max_num_seqs: int = 8, **cache: int
) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            model=ModelConfigSource(path=path, device="cpu", dtype=dtype),
            cache=CacheConfig(block_size=block_size, **({"num_blocks": 4096 // block_size} | cache)),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        )
    )


def _prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_of_a_mixed_batch(checkpoint: Callable[[str], Path], architecture: str) -> None:
    """Prompts arrive while others decode, in chunks, with one that is released and whose row is used again."""
    driver = StepDriver(_runner(checkpoint(architecture)))
    oracle = load_oracle(checkpoint(architecture))
    prompts = {row: _prompt(length, seed=row) for row, length in enumerate((50, 7, 130))}
    driver.add(0, prompts[0])
    driver.step({0: 20})
    driver.add(2, prompts[2])
    driver.step({2: 100, 0: 30})
    driver.add(1, prompts[1])
    driver.step({0: 1, 1: 7, 2: 30})
    for _ in range(8):
        driver.step({2: 1, 0: 1, 1: 1})
    results = {row: driver.rows[row].token_ids[len(prompt) :] for row, prompt in prompts.items()}
    driver.release(1)
    again = _prompt(33, seed=9)
    driver.add(1, again)
    driver.step({1: 33, 0: 1})
    results[1 + 10] = driver.generate(1, 5)
    prompts[1 + 10] = again + driver.rows[1].token_ids[33:34]
    for row, tokens in results.items():
        assert tokens == oracle_greedy(oracle, prompts[row], len(tokens)), row


WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "in all layers": ("mistral", {"sliding_window": 20}),
    "of two tokens": ("mistral", {"sliding_window": 2}),
    "in all layers of a model that could mix": ("qwen2", {"max_window_layers": 0}),
    "in five of six layers": (
        "qwen2",
        {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "in every other layer, with sinks and experts": ("gpt_oss", {"num_hidden_layers": 4, "sliding_window": 16}),
    "in the last three of five layers": (
        "qwen3",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2},
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_of_many_windows_without_the_blocks_behind_them(tmp_path: Path, name: str) -> None:
    """The driver gives blocks that left a window to other rows, after it filled them with what is no number."""
    architecture, changes = WINDOWED[name]
    path = make_checkpoint(tmp_path, architecture, **changes)
    runner = _runner(path, num_blocks=400)
    driver, oracle = StepDriver(runner), load_oracle(path)
    prompts = {row: _prompt(length, seed=row) for row, length in enumerate((230, 90, 41))}
    for row in (0, 1):
        driver.add(row, prompts[row])
    driver.step({0: 100, 1: 30})
    driver.step({0: 3, 1: 59})
    driver.add(2, prompts[2])
    driver.step({0: 127, 1: 1, 2: 41})
    for _ in range(12):
        driver.step({2: 1, 0: 1, 1: 1})
    for row, prompt in prompts.items():
        tokens = driver.rows[row].token_ids[len(prompt) :]
        assert tokens == oracle_greedy(oracle, prompt, len(tokens)), row
    windows = [group.window for group in runner.layout.groups]
    held = [sum(block != ABSENT_BLOCK for block in table) for table in driver.rows[0].tables]
    assert all(count <= window // 16 + 2 for count, window in zip(held, windows, strict=True) if window is not None)
    assert all(count == -(-242 // 16) for count, window in zip(held, windows, strict=True) if window is None)


@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_greedy_tokens_with_any_block_size(checkpoint: Callable[[str], Path], block_size: int) -> None:
    driver = StepDriver(_runner(checkpoint("qwen2"), block_size=block_size))
    driver.add(3, _prompt(60))
    tokens = driver.generate(3, NUM_TOKENS, chunk=25)
    assert tokens == oracle_greedy(load_oracle(checkpoint("qwen2")), _prompt(60), NUM_TOKENS)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_tokens_do_not_depend_on_chunks_on_neighbours_or_on_a_restart(
    checkpoint: Callable[[str], Path], sampling: SamplingParams
) -> None:
    runner = _runner(checkpoint("qwen3"))
    prompt = _prompt(90)

    alone = StepDriver(runner, seed=1)
    alone.add(0, prompt, sampling=sampling)
    expected = alone.generate(0, NUM_TOKENS)

    chunked = StepDriver(runner, seed=2)
    chunked.add(5, prompt, sampling=sampling)
    assert chunked.generate(5, NUM_TOKENS, chunk=13) == expected

    crowded = StepDriver(runner, seed=3)
    crowded.add(1, _prompt(20, seed=5), sampling=RANDOM)
    crowded.add(2, prompt, sampling=sampling)
    crowded.add(0, _prompt(3, seed=6))
    tokens = [crowded.step({0: 3, 1: 20, 2: 90})[2]]
    tokens += [crowded.step({1: 1, 2: 1, 0: 1})[2] for _ in range(NUM_TOKENS - 1)]
    assert tokens == expected

    resumed = StepDriver(runner, seed=4)
    resumed.add(4, prompt + expected[:10], sampling=sampling, num_output_tokens=10)
    assert resumed.generate(4, NUM_TOKENS - 10, chunk=50) == expected[10:]


def test_only_rows_that_reach_their_last_token_sample(checkpoint: Callable[[str], Path]) -> None:
    driver = StepDriver(_runner(checkpoint("llama")))
    driver.add(0, _prompt(10))
    driver.add(1, _prompt(10, seed=1))
    sampled, output = driver.run({0: 4, 1: 10})
    assert sampled.keys() == {1}
    assert output.sampled_token_ids.tolist() == [sampled[1]]
    assert output.has_nan is not None
    assert output.has_nan.tolist() == [False]


def test_a_step_that_only_releases_samples_nothing(checkpoint: Callable[[str], Path]) -> None:
    runner = _runner(checkpoint("llama"))
    output = SchedulerOutput(
        step_id=0,
        rows=EMPTY_INTS,
        first_positions=EMPTY_INTS,
        num_scheduled_tokens=EMPTY_INTS,
        num_samples=EMPTY_INTS,
        released_rows=np.array([2], dtype=np.int32),
    )
    assert runner.execute(output).sampled_token_ids.size == 0


def test_recomputing_a_damaged_block_repairs_it(checkpoint: Callable[[str], Path]) -> None:
    """The valid blocks after the damaged one stay as they are (K4)."""
    runner = _runner(checkpoint("mistral"))
    driver = StepDriver(runner)
    driver.add(0, _prompt(64))
    expected = driver.step({0: 64})[0]
    damaged = driver.rows[0].block_ids[1]
    good = read_block(runner.kv_cache, damaged)
    write_block(runner.kv_cache, damaged, bytes(len(good)))
    driver.rows[0].token_ids.pop()
    driver.rows[0].num_computed = 16
    assert driver.step({0: 16}) == {}
    repaired = read_block(runner.kv_cache, damaged)
    numbers = [np.frombuffer(content, dtype=np.float32) for content in (good, repaired)]
    np.testing.assert_allclose(numbers[0], numbers[1], atol=1e-5)
    driver.rows[0].num_computed = 63
    assert driver.step({0: 1})[0] == expected


def test_damaged_kv_changes_what_is_sampled(checkpoint: Callable[[str], Path]) -> None:
    """So that tests which corrupt KV on purpose do see it."""
    runner = _runner(checkpoint("llama"))
    driver = StepDriver(runner)
    driver.add(0, _prompt(64))
    expected = driver.generate(0, 12)
    for block in driver.rows[0].block_ids[:3]:
        write_block(runner.kv_cache, block, bytes(runner.layout.block_bytes))
    driver.rows[0].token_ids = driver.rows[0].token_ids[:65]
    driver.rows[0].num_computed = 64
    assert expected[:1] + driver.generate(0, 11) != expected


def test_nan_in_the_cache_is_reported_for_its_row(checkpoint: Callable[[str], Path]) -> None:
    runner = _runner(checkpoint("llama"))
    driver = StepDriver(runner)
    for row in (0, 1):
        driver.add(row, _prompt(40, seed=row))
    driver.step({0: 40, 1: 40})
    count = runner.layout.block_bytes // 4
    nan = np.full(count, np.nan, dtype=np.float32).tobytes()
    write_block(runner.kv_cache, driver.rows[1].block_ids[0], nan)
    _, output = driver.run({0: 1, 1: 1})
    assert output.has_nan is not None
    assert output.has_nan.tolist() == [False, True]


def test_region_and_layout_describe_the_memory(checkpoint: Callable[[str], Path]) -> None:
    runner = _runner(checkpoint("qwen3"), num_blocks=100)
    blocks = runner.kv_cache.blocks
    assert blocks.shape == (100, 3, 3, 2, 16, 32)
    assert blocks.is_contiguous()
    assert runner.layout.block_bytes == blocks[0].nbytes
    assert runner.region.base_address == blocks.data_ptr()
    assert runner.region.base_address % mmap.PAGESIZE == 0
    assert runner.region.total_bytes == blocks.nbytes
    assert runner.region.memory is MemoryKind.DRAM
    assert runner.num_blocks == 100
    assert runner.eos_token_ids == (2,)
    assert runner.max_model_len == MAX_POSITION_EMBEDDINGS


def _resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that contains an address, from ``/proc/self/smaps``."""
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_ours = start <= address < end
        elif is_ours and first == "Rss:":
            return 1024 * int(line.split()[1])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_memory_of_the_cache_is_taken_when_it_is_used_or_at_the_start(checkpoint: Callable[[str], Path]) -> None:
    lazy = _runner(checkpoint("llama"), num_blocks=20000)
    assert _resident_bytes(lazy.region.base_address) < lazy.region.total_bytes // 4
    prompt = _runner(checkpoint("llama"), num_blocks=20000, prefault=True)
    assert _resident_bytes(prompt.region.base_address) >= prompt.region.total_bytes


def test_a_block_lies_in_one_piece(checkpoint: Callable[[str], Path]) -> None:
    runner = _runner(checkpoint("llama"))
    content = np.random.default_rng(0).bytes(runner.layout.block_bytes)
    write_block(runner.kv_cache, 5, content)
    assert read_block(runner.kv_cache, 5) == content
    first = 5 * runner.layout.block_bytes
    flat = runner.kv_cache.blocks.flatten().view(torch.uint8)
    assert flat[first : first + len(content)].numpy().tobytes() == content


def test_engines_with_the_same_weights_have_the_same_layout(checkpoint: Callable[[str], Path]) -> None:
    one, two = _runner(checkpoint("llama")), _runner(checkpoint("llama"), num_blocks=77)
    assert one.layout.layout_hash == two.layout.layout_hash
    assert _runner(checkpoint("llama"), dtype="bfloat16").layout.layout_hash != one.layout.layout_hash
    assert _runner(checkpoint("mistral")).layout.model_hash != one.layout.model_hash


def test_warm_up_leaves_no_trace(checkpoint: Callable[[str], Path]) -> None:
    runner = _runner(checkpoint("llama"))
    runner.warm_up()
    assert not runner.kv_cache.blocks.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_generates_likely_tokens(
    checkpoint: Callable[[str], Path], architecture: str, dtype: DTypeName
) -> None:
    driver = StepDriver(_runner(checkpoint(architecture), dtype=dtype))
    prompt = _prompt(40)
    driver.add(0, prompt)
    tokens = driver.generate(0, NUM_TOKENS, chunk=17)
    with torch.inference_mode():
        logits = load_oracle(checkpoint(architecture))(torch.tensor([prompt + tokens])).logits[0, 39:-1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    assert (logits.max(dim=1).values - chosen).max().item() < (0.6 if dtype == "bfloat16" else 0.08)


def test_the_dtype_is_the_checkpoints_unless_said_otherwise(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(model=ModelConfigSource(path=checkpoint("llama"), device="cpu"))
    assert ModelRunner(config).layout.dtype == "float32"


@pytest.mark.parametrize("asked", [0, MAX_POSITION_EMBEDDINGS + 1])
def test_a_max_model_len_that_the_model_cannot_have(checkpoint: Callable[[str], Path], asked: int) -> None:
    config = EngineConfig(
        model=ModelConfigSource(path=checkpoint("llama"), device="cpu"), scheduler=SchedulerConfig(max_model_len=asked)
    )
    with pytest.raises(ConfigError, match=f"between 1 and the model's {MAX_POSITION_EMBEDDINGS}, got {asked}"):
        ModelRunner(config)


def test_a_shorter_max_model_len_needs_less_cache(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(
        model=ModelConfigSource(path=checkpoint("llama"), device="cpu"),
        cache=CacheConfig(num_blocks=4),
        scheduler=SchedulerConfig(max_model_len=64, max_num_seqs=2),
    )
    runner = ModelRunner(config)
    driver = StepDriver(runner)
    driver.add(0, _prompt(50))
    assert driver.generate(0, 15) == oracle_greedy(load_oracle(checkpoint("llama")), _prompt(50), 15)


def test_a_cache_too_small_for_one_request_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="too small for one request of max_model_len 1024"):
        _runner(checkpoint("llama"), num_blocks=63)


def test_a_gpu_is_used_where_there_is_one_and_refused_where_there_is_none() -> None:
    if torch.cuda.is_available():
        assert choose_device("cuda").type == choose_device("auto").type == "cuda"
    else:
        assert choose_device("auto").type == "cpu"
        with pytest.raises(ConfigError, match="torch finds no CUDA device"):
            choose_device("cuda")


def test_a_gpu_without_bfloat16_computes_in_float16(checkpoint: Callable[[str], Path]) -> None:
    config = dataclasses.replace(load_model_config(checkpoint("llama")), dtype="bfloat16")
    cuda, half = torch.device("cuda"), frozenset({torch.float16})
    assert choose_dtype("auto", config, cuda, fast_dtypes=half) is torch.float16
    assert choose_dtype("auto", config, cuda, fast_dtypes=half | {torch.bfloat16}) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"does not support torch.bfloat16 \(bfloat16\); use dtype float16"):
        choose_dtype("bfloat16", config, cuda, fast_dtypes=half)


def test_a_checkpoint_may_ask_for_float32_on_a_cpu() -> None:
    config = load_model_config(builtin_model_dir())
    assert choose_dtype("auto", config, torch.device("cpu")) is torch.float32
    assert choose_dtype("auto", config, torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("bfloat16", config, torch.device("cpu")) is torch.bfloat16


def test_auto_is_float32_on_a_cpu_that_emulates_the_checkpoints_dtype(
    checkpoint: Callable[[str], Path],
) -> None:
    cpu = torch.device("cpu")
    config = dataclasses.replace(load_model_config(checkpoint("llama")), dtype="bfloat16", cpu_dtype="bfloat16")
    plain = frozenset({torch.float32})
    assert choose_dtype("auto", config, cpu, fast_dtypes=plain) is torch.float32
    assert choose_dtype("auto", config, cpu, fast_dtypes=plain | {torch.bfloat16}) is torch.bfloat16
    assert choose_dtype("bfloat16", config, cpu, fast_dtypes=plain) is torch.bfloat16


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        _runner(tmp_path)


def test_progress_is_reported_while_loading(checkpoint: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    config = EngineConfig(model=ModelConfigSource(path=checkpoint("llama"), device="cpu"))
    ModelRunner(config, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 10
    assert seen[-1][0] == seen[-1][1]


def test_the_number_of_threads_is_the_one_given(checkpoint: Callable[[str], Path]) -> None:
    before = torch.get_num_threads()
    try:
        ModelRunner(EngineConfig(model=ModelConfigSource(path=checkpoint("llama"), device="cpu", num_threads=1)))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
