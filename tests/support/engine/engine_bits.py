"""A program that prints digests of what an engine computes, so that two processes can be compared bit by bit."""

from __future__ import annotations

import sys
from hashlib import blake2b
from pathlib import Path

import torch

from engine.build import build_engine
from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.offline import generate
from tests.support.engine.requests import greedy_request

NUM_REQUESTS = 6
NUM_TOKENS = 60
SMALLEST_VOCABULARY = 300
"""Not that of ``checkpoints``, whose import takes as long as a run."""


def _prompts() -> list[list[int]]:
    """Prompts from less than a step's budget to several chunks."""
    generator = torch.Generator().manual_seed(3)
    lengths = range(20, 20 + 17 * NUM_REQUESTS, 17)
    return [torch.randint(3, SMALLEST_VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def engine_bits(path: Path, dtype: DTypeName) -> str:
    """A digest of the KV cache and of the tokens after a few greedy requests."""
    config = EngineConfig(
        model=ModelConfigSource(path=path, device="cpu", dtype=dtype),
        cache=CacheConfig(num_blocks=128, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=64),
    )
    built = build_engine(config)
    assert isinstance(built.executor, SingleProcessExecutor)
    prompts = _prompts()
    outputs = generate(built.core, [greedy_request(str(n), p, max_tokens=NUM_TOKENS) for n, p in enumerate(prompts)])
    kv_bytes = built.executor.runner.kv_cache.blocks.contiguous().view(torch.uint8).numpy().tobytes()
    return blake2b(kv_bytes + repr(sorted(outputs.items())).encode(), digest_size=8).hexdigest()


def main() -> None:
    """Print a line for each checkpoint folder named, in both dtypes."""
    torch.set_num_threads(2)
    for argument in sys.argv[1:]:
        path = Path(argument)
        dtypes: tuple[DTypeName, ...] = ("float32", "bfloat16")
        for dtype in dtypes:
            print(path.name, dtype, engine_bits(path, dtype))


if __name__ == "__main__":
    main()
