"""Two engines in two processes on one GPU: KV goes from VRAM to VRAM by NIXL, tokens are those of one engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts.engine import EngineBench, Settings
from benchmarks.gpu_parts.hand_over import Meeting, hand_over, nixl_builder, prefilling
from benchmarks.gpu_parts.shape import SHAPES, write_llama
from kv_transfer.layout import MemoryKind
from kv_transfer.transfer_options import TransportChoice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transport", ("network", "local"))
@pytest.mark.parametrize("block_size", (16, 256))
def test_tokens_are_those_of_one_engine(tmp_path: Path, block_size: int, transport: TransportChoice) -> None:
    shape = SHAPES["tiny"]
    write_llama(tmp_path, shape, torch.device("cuda"))
    settings = Settings(directory=tmp_path, shape=shape, device="cuda", block_size=block_size, share=0.1)
    meeting = Meeting()
    decode = EngineBench(settings, nixl_builder("decode", meeting, transport=transport))
    try:
        assert decode.engine.facts.memory is MemoryKind.VRAM
        with prefilling(settings, meeting, transport=transport) as prefill:
            for num_tokens in (17, 40, 300):
                request = decode.request(num_tokens, max_tokens=20)
                found = hand_over(prefill, decode, request)
                assert found.token_ids == decode.generate(request)
                assert found.num_bytes > 0
    finally:
        decode.close()
