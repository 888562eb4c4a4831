"""A small model over a cache filled with numbers, and decode steps of any batch on it, with and without graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.attention.backend import AttentionBatch
from engine.attention.cuda import CUDAAttention
from engine.device.kv_cache import KVCache
from engine.model.step_context import StepContext
from engine.runner.decode_graphs import DecodeGraphs, GraphSettings
from engine.runner.step_inputs import StepInputs
from tests.support.attention.fake_graph_device import FakeGraphDevice
from tests.support.engine.checkpoints import VOCAB_SIZE
from tests.support.engine.model_harness import ModelHarness

NUM_BLOCKS = 96
MAX_MODEL_LEN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRig:
    """``cache`` has a scratch block after its NUM_BLOCKS blocks."""

    harness: ModelHarness
    device: FakeGraphDevice
    cache: KVCache
    attention: CUDAAttention
    graphs: DecodeGraphs

    @classmethod
    def build(
        cls,
        path: Path,
        *,
        sizes: tuple[int, ...],
        device: FakeGraphDevice | None = None,
        block_multiple: int = 1,
        is_required: bool = False,
    ) -> DecodeRig:
        """Nothing is captured yet."""
        device = device or FakeGraphDevice()
        harness = ModelHarness(path, num_blocks=1)
        cache = _full_cache(harness)
        settings = GraphSettings(sizes=sizes, max_model_len=MAX_MODEL_LEN, is_required=is_required)
        return cls(
            harness=harness,
            device=device,
            cache=cache,
            attention=device.attention(cache, block_multiple=block_multiple),
            graphs=DecodeGraphs(device, harness.model.forward, settings),
        )

    def capture(self) -> None:
        """Capture all sizes."""
        self.graphs.capture(self.cache, self.attention)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Run a step by its graph, if there is one for it."""
        return self.graphs.run(inputs)

    @torch.inference_mode()
    def run_eagerly(self, inputs: StepInputs) -> torch.Tensor:
        """Run the same step without a graph."""
        plans = self.attention.plan(inputs.attention)
        context = StepContext(positions=torch.from_numpy(inputs.positions), plans=plans)
        return self.harness.model.forward(torch.from_numpy(inputs.input_ids), context).clone()

    def random_step(self, rng: np.random.Generator, lengths: list[int]) -> StepInputs:
        """A step in which each row computes its last token; no two rows share a block."""
        block_size = self.cache.layout.block_size
        seq_lens = np.array(lengths)
        positions = seq_lens - 1
        counts = -(-seq_lens // block_size)
        num_groups = self.cache.layout.num_groups
        blocks = rng.permutation(NUM_BLOCKS)[: num_groups * counts.sum()].astype(np.int32)
        tables = np.full((num_groups, len(lengths), counts.max()), blocks[0], dtype=np.int32)
        for group in range(num_groups):
            for row, count in enumerate(counts.tolist()):
                tables[group, row, :count], blocks = blocks[:count], blocks[count:]
        last_blocks = tables[:, np.arange(len(lengths)), positions // block_size].astype(np.int64)
        return _step(
            rng.integers(0, VOCAB_SIZE, len(lengths)),
            positions,
            tables,
            last_blocks * block_size + positions % block_size,
        )

    def padded(self, inputs: StepInputs, batch_size: int) -> StepInputs:
        """The step with additional rows that compute token 0 at position 0 of the scratch block."""
        attention, missing = inputs.attention, batch_size - inputs.attention.num_reqs
        scratch = self.cache.scratch_block
        zeros = np.zeros(missing, dtype=np.int64)
        num_groups, _, num_columns = attention.block_tables.shape
        tables = np.full((num_groups, missing, num_columns), scratch, dtype=np.int32)
        slots = np.full((num_groups, missing), scratch * self.cache.layout.block_size)
        return _step(
            np.concatenate((inputs.input_ids, zeros)),
            np.concatenate((inputs.positions, zeros)),
            np.concatenate((attention.block_tables, tables), axis=1),
            np.concatenate((attention.slots, slots), axis=1),
        )

    def with_longer_row(self, inputs: StepInputs) -> StepInputs:
        """The step with one more token in its last row, so that graphs cannot run it."""
        attention = inputs.attention
        again = np.array([len(inputs.positions) - 1])
        starts = attention.query_starts.copy()
        starts[-1] += 1
        return replace(
            inputs,
            input_ids=np.append(inputs.input_ids, inputs.input_ids[again]),
            positions=np.append(inputs.positions, inputs.positions[again] + 1),
            attention=replace(
                attention,
                query_starts=starts,
                slots=np.append(attention.slots, attention.slots[:, again] + 1, axis=1),
            ),
        )

    def blocks_without_scratch(self) -> torch.Tensor:
        """A copy of all blocks that requests can have."""
        return self.cache.blocks[:NUM_BLOCKS].clone()


def _full_cache(harness: ModelHarness) -> KVCache:
    layout = harness.cache.layout
    cache = KVCache(
        layout,
        num_blocks=NUM_BLOCKS,
        dtype=harness.cache.blocks.dtype,
        device=harness.cache.blocks.device,
        num_scratch_blocks=1,
    )
    generator = torch.Generator().manual_seed(11)
    cache.blocks[:NUM_BLOCKS] = torch.randn(cache.blocks[:NUM_BLOCKS].shape, generator=generator)
    return cache


def _step(input_ids: np.ndarray, positions: np.ndarray, tables: np.ndarray, slots: np.ndarray) -> StepInputs:
    num_rows = len(input_ids)
    rows = np.arange(num_rows, dtype=np.int32)
    return StepInputs(
        input_ids=input_ids.astype(np.int64),
        positions=positions.astype(np.int64),
        attention=AttentionBatch(
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            first_positions=positions.astype(np.int32),
            block_tables=tables,
            slots=slots.astype(np.int64),
        ),
        last_tokens=rows.astype(np.int64),
        sampled_rows=rows,
        sampled_positions=positions.astype(np.int32) + 1,
    )
