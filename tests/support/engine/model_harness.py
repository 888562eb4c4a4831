"""Runs a decoder over a paged cache and returns the logits of every token, which a runner never computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.attention.backend import AttentionBatch
from engine.attention.factory import build_attention
from engine.contract.config import ModelCode, ModelImplName
from engine.device.kv_cache import KVCache
from engine.model.loading import load_model
from engine.model.registry import load_model_config
from engine.model.step_context import StepContext
from engine.runner.device import DTYPES
from kv_transfer.layout import KVLayout


@dataclass(slots=True)
class HarnessSequence:
    """A sequence, the number of its cached tokens, and its blocks in each KV cache group."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[list[int]] = field(default_factory=list)


class ModelHarness:
    """One checkpoint in one precision, with a cache whose blocks are handed out in a shuffled order."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str = "float32",
        block_size: int = 16,
        num_blocks: int = 1024,
        max_model_len: int | None = None,
        model_impl: ModelImplName = "auto",
    ) -> None:
        config = load_model_config(path, ModelCode(impl=model_impl))
        max_model_len = max_model_len or config.max_model_len
        config = config.for_length(max_model_len)
        device = torch.device("cpu")
        self.model = load_model(path, config, max_positions=max_model_len, dtype=DTYPES[dtype], device=device)
        layout = KVLayout(
            model_hash="",
            groups=config.kv_cache_groups,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_parts=config.num_kv_parts,
            block_size=block_size,
            dtype=dtype,
            bytes_per_element=DTYPES[dtype].itemsize,
        )
        self.cache = KVCache(layout, num_blocks=num_blocks, dtype=DTYPES[dtype], device=device)
        self._attention = build_attention(self.cache)
        self._free = [int(block) for block in np.random.default_rng(7).permutation(num_blocks)]

    def start(self, token_ids: list[int]) -> HarnessSequence:
        """A new sequence with room for its tokens."""
        num_blocks = -(-len(token_ids) // self.cache.layout.block_size)
        groups = range(self.cache.layout.num_groups)
        return HarnessSequence(token_ids, block_ids=[[self._free.pop() for _ in range(num_blocks)] for _ in groups])

    @torch.inference_mode()
    def run(self, *work: tuple[HarnessSequence, int]) -> list[torch.Tensor]:
        """Compute the given number of next tokens of each sequence in one batch; returns logits [num_tokens,
        vocab_size] for each.
        """
        sequences = [sequence for sequence, _ in work]
        counts = [count for _, count in work]
        width = max(len(sequence.block_ids[0]) for sequence in sequences)
        tables = np.zeros((self.cache.layout.num_groups, len(work), width), dtype=np.int32)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = []
        block_size = self.cache.layout.block_size
        for index, (sequence, count) in enumerate(work):
            tables[:, index, : len(sequence.block_ids[0])] = sequence.block_ids
            for position in range(sequence.num_computed, sequence.num_computed + count):
                ids.append(sequence.token_ids[position])
                positions.append(position)
                block, offset = divmod(position, block_size)
                slots.append([blocks[block] * block_size + offset for blocks in sequence.block_ids])
        batch = AttentionBatch(
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            first_positions=np.array([sequence.num_computed for sequence in sequences], dtype=np.int32),
            block_tables=tables,
            slots=np.ascontiguousarray(np.array(slots, dtype=np.int64).T),
        )
        context = StepContext(positions=torch.tensor(positions), plans=self._attention.plan(batch))
        hidden = self.model.forward(torch.tensor(ids), context)
        for sequence, count in work:
            sequence.num_computed += count
        return list(self.model.logits(hidden).float().split(counts))
