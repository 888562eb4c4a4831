"""The attention kernels for decode rows, compared with each other and with the limit of the GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_parts.ceilings import median_s
from benchmarks.gpu_parts.shape import LlamaShape
from benchmarks.report import Row
from engine.attention.kernel_choice import torch_candidates
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig

CASES = ((1, 512), (1, 8192), (8, 2048), (32, 512), (32, 8192), (64, 2048))
"""Numbers of rows, and the number of tokens that each row attends to."""

NUM_LAYERS = 8
"""Number of calls in a graph: a single one takes longer to launch than to compute."""


def decode_kernel_rows(shape: LlamaShape, block_size: int, memory_bytes_per_s: float) -> Iterator[Row]:
    """Rows ``attention/<rows>x<tokens>/<kernel>``: microseconds of one layer, captured as a graph. Kernels that do not
    support such blocks have no row. ``of_memory`` is the ratio to the time of only reading the keys and values.
    """
    found = torch_candidates()
    kernels: dict[str, VarlenKernel] = {"triton": found.decode[0], "flash": found.paged[0]}
    spec = AttentionSpec(scale=1 / math.sqrt(shape.head_dim), rope=RopeConfig())
    device = torch.device("cuda")
    for num_rows, num_tokens in CASES:
        blocks_of_row = -(-num_tokens // block_size)
        sizes = num_rows * blocks_of_row, shape.num_kv_heads, 2, block_size, shape.head_dim
        blocks = torch.randn(sizes, device=device, dtype=torch.bfloat16)
        keys, values = (blocks[:, :, part].transpose(1, 2) for part in (0, 1))
        query = torch.randn(num_rows, shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        batch = VarlenShape(
            query_starts=starts,
            seq_lens=torch.full((num_rows,), num_tokens, dtype=torch.int32, device=device),
            key_starts=starts * num_tokens,
            block_tables=torch.randperm(len(blocks), device=device).to(torch.int32).view(num_rows, blocks_of_row),
            max_query_len=1,
            max_seq_len=num_tokens,
        )
        floor_s = num_rows * num_tokens * shape.kv_bytes_per_token / shape.num_layers / memory_bytes_per_s
        for name, kernel in kernels.items():
            seconds = _captured_s(partial(kernel, query, keys, values, batch, spec), device)
            if seconds is not None:
                share = floor_s / (seconds / NUM_LAYERS)
                yield Row(
                    name=f"attention/{num_rows}x{num_tokens}/{name}",
                    value=1e6 * seconds / NUM_LAYERS,
                    unit="us",
                    detail={"of_memory": share},
                )


@torch.inference_mode()
def _captured_s(attend: Callable[[], object], device: torch.device) -> float | None:
    """Median seconds of replaying all calls; None if the kernel does not support the shape."""

    def work() -> None:
        for _ in range(NUM_LAYERS):
            attend()

    graph = torch.cuda.CUDAGraph()
    try:
        work()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            work()
    except (RuntimeError, NotImplementedError):
        return None
    return median_s(graph.replay, device)
