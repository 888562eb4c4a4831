"""The executor of one process: its facts, and its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.build import build_engine, join_engine, worker_info
from engine.contract.executor import EngineFacts
from engine.device.commit_ahead import CommitAhead
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.offline import generate
from kv_transfer.layout import MemoryKind
from kv_transfer.params import PeerIdentity
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.requests import greedy_request

PROMPT = list(range(3, 40))


def test_it_describes_the_engine_it_loaded(checkpoint: Callable[[str], Path]) -> None:
    executor = SingleProcessExecutor(small_engine_config(checkpoint("llama"), num_blocks=70))

    facts = executor.describe()

    runner = executor.runner
    assert facts == EngineFacts(
        layout=runner.layout,
        num_blocks=70,
        max_model_len=runner.max_model_len,
        vocab_size=runner.model_config.vocab_size,
        eos_token_ids=(2,),
        device="cpu",
        memory=MemoryKind.DRAM,
    )
    assert [region.num_blocks for region in executor.regions] == [70]


def test_a_worker_tells_others_what_its_executor_said(checkpoint: Callable[[str], Path]) -> None:
    built = build_engine(small_engine_config(checkpoint("llama"), num_blocks=70))

    assert built.facts.num_threads == torch.get_num_threads()
    info = worker_info(
        built.facts, role="decode", identity=PeerIdentity(engine_id="e", incarnation="1"), node_ip="", model_name="m"
    )

    assert (info.num_threads, info.thread_speedup) == (built.facts.num_threads, built.facts.thread_speedup)
    assert (info.num_blocks, info.block_size) == (70, built.facts.layout.block_size)
    assert (info.vocab_size, info.max_model_len) == (built.facts.vocab_size, built.facts.max_model_len)
    assert (info.device, info.dtype) == ("cpu", "float32")


def test_an_engine_around_an_executor_is_the_one_that_is_built_from_settings(
    checkpoint: Callable[[str], Path],
) -> None:
    config = small_engine_config(checkpoint("llama"))
    request = greedy_request("r", PROMPT, max_tokens=8)

    joined = join_engine(config, SingleProcessExecutor(config))

    assert generate(joined.core, [request]) == generate(build_engine(config).core, [request])


def test_memory_of_the_cache_is_committed_ahead_of_the_blocks_in_use(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(CommitAhead, "use", lambda _, num_bytes: used.append(num_bytes))
    built = build_engine(small_engine_config(checkpoint("llama"), num_blocks=70))

    generate(built.core, [greedy_request("r", PROMPT, max_tokens=8)])

    num_blocks = -(-(len(PROMPT) + 7) // built.facts.layout.block_size)
    assert max(used) == num_blocks * built.facts.layout.block_bytes


def test_a_step_does_not_ask_for_memory_that_is_committed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    use = CommitAhead.use
    monkeypatch.setattr(CommitAhead, "use", lambda ahead, num_bytes: (used.append(num_bytes), use(ahead, num_bytes)))
    built = build_engine(small_engine_config(checkpoint("llama"), num_blocks=70))

    generate(built.core, [greedy_request("r", PROMPT, max_tokens=8)])

    assert len(used) == len(set(used)), "a cache of this size is not committed ahead: once asked, nothing is left to do"


def test_closing_an_engine_frees_its_model(checkpoint: Callable[[str], Path]) -> None:
    built = build_engine(small_engine_config(checkpoint("llama")))
    assert isinstance(built.executor, SingleProcessExecutor)
    runner = weakref.ref(built.executor.runner)

    built.core.close()
    built.core.close()

    gc.collect()
    assert runner() is None
    with pytest.raises(AssertionError, match="closed"):
        built.executor.describe()
