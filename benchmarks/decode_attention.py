"""Attention of a decode step on the CPU: the compiled kernel over 12 layers, compared with the speed of reading memory.

    python -m benchmarks.decode_attention --json benchmarks/results/decode_attention.json

12 query and 4 key-value heads of 64, blocks of 16 in random order. Rows ``<dtype>/<requests>x<context>`` are medians in
ms of a layer, each layer in its turn, so that large batches come from memory; their detail has the GB/s of keys and
values. ``ratio/...`` is that over what memory gives: 1 is the ceiling, more says that they came from a cache.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.arguments import count
from benchmarks.ceilings import memory_read_gb_per_s
from benchmarks.report import Row, add_json_option, publish
from benchmarks.run_attention import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, layer_at, median_ms, new_cache
from engine.attention.backend import AttentionBatch
from engine.attention.paged_queries import PagedKernel, PagedQueries
from engine.device.torch_environment import prepare_torch

NUM_LAYERS = 12
SHAPES = ((1, 160), (8, 160), (16, 160), (32, 160), (16, 1024))


def measure(dtype: torch.dtype, num_requests: int, context: int, ceiling: float, num_repeats: int) -> list[Row]:
    """Measure one batch."""
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = num_requests * blocks_each
    cache = new_cache(dtype, num_blocks, num_layers=NUM_LAYERS)
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(1, num_requests, blocks_each)
    batch = AttentionBatch(
        query_starts=np.arange(num_requests + 1, dtype=np.int32),
        first_positions=np.full(num_requests, context - 1, dtype=np.int32),
        block_tables=tables,
        slots=np.zeros((1, num_requests), dtype=np.int64),
    )
    queries = PagedQueries(PagedKernel(cache), batch, tables[0])
    query = torch.randn(num_requests, NUM_HEADS, HEAD_DIM).to(dtype)
    layers = [layer_at(index) for index in range(NUM_LAYERS)]

    def step() -> None:
        for layer in layers:
            queries.attend(layer, query)

    layer_ms = median_ms(step, num_repeats) / NUM_LAYERS
    gb_per_s = num_requests * context * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize / layer_ms / 1e6
    name = f"{cache.layout.dtype}/{num_requests}x{context}"
    return [
        Row(name=name, value=layer_ms, unit="ms", detail={"gb_per_s": gb_per_s}),
        Row(name=f"ratio/{name}", value=gb_per_s / ceiling, unit="x"),
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=30)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    prepare_torch(args.threads)
    torch.set_num_threads(args.threads)
    ceiling = memory_read_gb_per_s()
    rows = [Row(name="ceiling/memory_read", value=ceiling, unit="GB/s")]
    for dtype in (torch.float32, torch.bfloat16):
        for num_requests, context in SHAPES:
            rows += measure(dtype, num_requests, context, ceiling, args.repeats)
    publish(rows, packages=("torch", "numba"), json_file=args.json, title="attention of a decode step, CPU")


if __name__ == "__main__":
    main()
