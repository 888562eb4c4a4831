"""An engine whose steps compute with one thread and with two in turn, and where these threads run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.offline import generate
from tests.support.engine.requests import greedy_request


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Alternating:
    """A ``StepThreads`` that changes the number of threads as often as it can."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts = counts
        self.num_turns = self.num_between = 0
        self.is_closed = False

    def begin_step(self) -> bool:
        """The next number."""
        self.num_turns += 1
        count = self._counts[self.num_turns % len(self._counts)]
        torch.set_num_threads(count)
        return count > 1

    def between_layers(self) -> None:
        """The next number."""
        self.num_between += 1
        self.begin_step()

    @property
    def step_cores(self) -> float:
        """Its own alone, as far as anybody asks."""
        return 1.0

    def rest(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


def run(path: Path, dtype: DTypeName, threads: Alternating) -> tuple[str, int]:
    """A digest of tokens and KV after some prompts of several chunks, and how many steps borrowed."""
    config = EngineConfig(
        model=ModelConfigSource(path=path, device="cpu", dtype=dtype, num_threads=1),
        cache=CacheConfig(num_blocks=96, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=96),
    )
    built = build_engine(config)
    built.core.share_cores(threads)
    assert isinstance(built.executor, SingleProcessExecutor)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 250, (length,), generator=generator).tolist() for length in (7, 130, 64, 97)]
    outputs = generate(built.core, [greedy_request(str(n), p, max_tokens=12) for n, p in enumerate(prompts)])
    kv_bytes = built.executor.runner.kv_cache.blocks.contiguous().view(torch.uint8).numpy().tobytes()
    digest = blake2b(kv_bytes + repr(sorted(outputs.items())).encode(), digest_size=8).hexdigest()
    num_borrowed = built.core.stats().num_borrowed_steps
    built.core.close()
    assert threads.is_closed
    return digest, num_borrowed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_tokens_and_kv_have_the_same_bits_whatever_number_of_threads_each_layer_has(
    architecture: str, dtype: DTypeName, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(architecture)

    alone, num_alone = run(path, dtype, Alternating((1,)))
    turning = Alternating((1, 2, 2, 1, 3))
    together, num_borrowed = run(path, dtype, turning)

    assert together == alone
    assert num_alone == 0 < num_borrowed
    assert turning.num_between > 0, "long steps look between their layers"


def test_threads_are_chosen_between_the_layers_of_transformers_models_too(checkpoint: Callable[[str], Path]) -> None:
    pytest.importorskip("transformers")
    from engine.contract.config import ModelCode

    config = EngineConfig(
        model=ModelConfigSource(
            path=checkpoint("llama"), device="cpu", num_threads=1, code=ModelCode(impl="transformers")
        ),
        cache=CacheConfig(num_blocks=96, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    built, threads = build_engine(config), Alternating((1, 2))
    built.core.share_cores(threads)
    generate(built.core, [greedy_request("a", [5] * 80, max_tokens=2)])
    built.core.close()

    assert threads.num_between >= 2


SHARING = """
import json, os, sys, threading
from pathlib import Path
import torch
from engine.device.core_share import CoreShare
from engine.frontend.os_threads import os_thread_name
from engine.runner.cpu_threads import settle_threads
from engine.runner.step_threads import share_cores

def cores_of_team():
    tasks = [int(t.name) for t in os.scandir("/proc/self/task") if open(t.path + "/comm").read().strip() == "team"]
    return [sorted(os.sched_getaffinity(task)) for task in sorted(tasks)]

def compute():
    torch.set_num_threads(1)
    with os_thread_name("team"):
        settle_threads()
        threads = share_cores(path, borrows=True)
        other = CoreShare(path, usable=sorted(os.sched_getaffinity(os.getpid())), num_own=1, borrows=True)
        other.begin_step()
        told["alone"] = threads.begin_step(), torch.get_num_threads(), cores_of_team()
        other.close()
        told["both"] = threads.begin_step(), torch.get_num_threads(), cores_of_team()
        other = CoreShare(path, usable=sorted(os.sched_getaffinity(os.getpid())), num_own=1, borrows=True)
        other.begin_step()
        threads.between_layers()
        told["given_back"] = torch.get_num_threads(), cores_of_team()
        told["niceness"] = [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]
        other.close()
        threads.close()

path, told = Path(sys.argv[1]), {}
os.sched_setaffinity(0, json.loads(sys.argv[2]))
thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(json.dumps(told))
"""


def test_each_thread_stays_on_a_core_of_its_own_while_some_are_borrowed(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    command = [sys.executable, "-c", SHARING, str(tmp_path / "private" / "cores"), json.dumps(cores)]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)

    assert told["alone"] == [False, 1, [cores]]
    if len(cores) < 2:  # there is nobody to borrow from
        assert told["both"] == told["alone"]
        return
    assert told["both"] == [True, 2, [[core] for core in cores]]
    num_threads, (stepping, waiting) = told["given_back"]
    assert (num_threads, stepping) == (1, cores), "the system places a thread that computes alone"
    assert waiting == [cores[1]], "it sleeps"
