"""Attention over a prompt's tokens on the CPU: the compiled kernel compared with torch's SDPA, on the same cache.

    python -m benchmarks.run_attention --json benchmarks/results/run_attention.json

12 query and 4 key-value heads of 64. Rows ``<dtype>/<new>+<history>`` are medians in ms, for ``new`` tokens of one
prompt behind ``history`` that are in the cache; SDPA's stands beside it, and ``ratio/...`` is SDPA's time over the
kernel's: above 1 is faster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.arguments import count
from benchmarks.report import Row, add_json_option, publish
from engine.attention.backend import AttentionBatch
from engine.attention.gathered_runs import GatheredRuns
from engine.attention.paged_runs import PagedRuns, choose_run_kernel
from engine.device.kv_cache import KVCache
from engine.layers.attention_layer import AttentionLayer, HeadTransform
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig
from kv_transfer.layout import KVLayout, group_layers

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 4, 64, 16
SHAPES = ((512, 0), (512, 1536), (2048, 0))


def new_cache(dtype: torch.dtype, num_blocks: int, *, num_layers: int = 1) -> KVCache:
    """A cache filled with normally distributed numbers."""
    layout = KVLayout(
        model_hash="",
        groups=group_layers([None] * num_layers),
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=str(dtype).removeprefix("torch."),
        bytes_per_element=dtype.itemsize,
    )
    cache = KVCache(layout, num_blocks=num_blocks, dtype=dtype, device=torch.device("cpu"))
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def median_ms(work: Callable[[], None], num_repeats: int) -> float:
    """Median milliseconds of a call, after a first one that does not count."""
    work()
    durations = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return 1e3 * statistics.median(durations)


def layer_at(index: int) -> AttentionLayer:
    """A layer, as attention sees it."""
    transform = HeadTransform(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, query_norm=None, key_norm=None)
    spec = AttentionSpec(scale=1 / math.sqrt(HEAD_DIM), rope=RopeConfig())
    return AttentionLayer(group=0, index=index, spec=spec, transform=transform)


def measure(dtype: torch.dtype, num_new: int, num_history: int, num_repeats: int) -> list[Row]:
    """Measure one shape with both implementations."""
    num_blocks = (num_new + num_history) // BLOCK_SIZE
    cache = new_cache(dtype, num_blocks)
    table = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
    positions = np.arange(num_history, num_history + num_new)
    slots = table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = AttentionBatch(
        query_starts=np.array([0, num_new], dtype=np.int32),
        first_positions=np.array([num_history], dtype=np.int32),
        block_tables=table[None, None],
        slots=slots[None],
    )
    query = torch.randn(num_new, NUM_HEADS, HEAD_DIM).to(dtype)
    places = torch.from_numpy(slots // BLOCK_SIZE), torch.from_numpy(slots % BLOCK_SIZE)
    keys, values = cache.keys(0)[places], cache.values(0)[places]
    layer = layer_at(0)
    output, requests = torch.empty_like(query), np.zeros(1, dtype=np.intp)
    kernel = choose_run_kernel(cache)
    if kernel is None:
        return []
    tables = batch.block_tables[0]
    ways = {"kernel": PagedRuns(kernel, batch, tables, requests), "sdpa": GatheredRuns(cache, batch, tables, requests)}
    times = {
        name: median_ms(lambda way=way: way.attend(layer, query, keys, values, output), num_repeats)  # type: ignore[misc]
        for name, way in ways.items()
    }
    name = f"{cache.layout.dtype}/{num_new}+{num_history}"
    return [
        Row(name=name, value=times["kernel"], unit="ms", detail={"sdpa": times["sdpa"]}),
        Row(name=f"ratio/{name}", value=times["sdpa"] / times["kernel"], unit="x"),
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=30)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [
        row
        for dtype in (torch.float32, torch.bfloat16)
        for num_new, num_history in SHAPES
        for row in measure(dtype, num_new, num_history, args.repeats)
    ]
    if not rows:
        raise SystemExit("this machine has no compiled kernel for either dtype: torch's SDPA is what it uses")
    publish(rows, packages=("torch", "numba"), json_file=args.json, title="attention over a prompt's tokens, CPU")


if __name__ == "__main__":
    main()
