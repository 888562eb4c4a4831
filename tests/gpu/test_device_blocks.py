"""Checksums, faults and the host tier where the KV cache lies on a GPU. Runs where CUDA is: `make test-gpu`."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
import xxhash

from kv_transfer.factory import build_connector
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.memory.block_memory import open_block_memory
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PeerIdentity
from kv_transfer.tier.host.arena import build_arena
from tests.support.engine.kv_engine import KVEngineSpec
from tests.support.kv.kv_child import NobodyToMeet

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 16
LAYOUT = KVEngineSpec(engine_id="gpu").layout
WAIT_TIMEOUT_S = 30.0


@dataclass
class DeviceCache:
    """Blocks on the GPU, filled with bytes that differ."""

    blocks: torch.Tensor

    @property
    def region(self) -> KVRegion:
        """Where they lie."""
        return KVRegion(
            base_address=self.blocks.data_ptr(),
            num_blocks=NUM_BLOCKS,
            block_bytes=LAYOUT.block_bytes,
            memory=MemoryKind.VRAM,
            device_index=self.blocks.device.index or 0,
        )

    def content(self, block_id: int) -> bytes:
        """A copy of a block's bytes."""
        return self.blocks[block_id].cpu().numpy().tobytes()


@pytest.fixture
def cache() -> DeviceCache:
    shape = (NUM_BLOCKS, LAYOUT.block_bytes)
    return DeviceCache(torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda"))


def test_checksums_are_those_of_the_same_bytes_in_host_memory(cache: DeviceCache) -> None:
    checksums = open_block_memory(cache.region).checksums((3, 0, 15))

    assert checksums == tuple(xxhash.xxh3_64_intdigest(cache.content(block_id)) for block_id in (3, 0, 15))


def test_flipped_bit_is_one_bit_of_one_block(cache: DeviceCache) -> None:
    before = [cache.content(block_id) for block_id in range(NUM_BLOCKS)]

    open_block_memory(cache.region).flip_bit(5, 8 * LAYOUT.block_bytes - 1)

    after = [cache.content(block_id) for block_id in range(NUM_BLOCKS)]
    assert [block_id for block_id in range(NUM_BLOCKS) if before[block_id] != after[block_id]] == [5]
    assert (int.from_bytes(before[5], "little") ^ int.from_bytes(after[5], "little")).bit_count() == 1


def test_arena_keeps_what_the_gpu_overwrites(cache: DeviceCache) -> None:
    arena = build_arena(cache.region, host_bytes=4 * LAYOUT.block_bytes)
    kept = [cache.content(block_id) for block_id in (7, 2)]
    arena.store((7, 2), (0, 3))
    cache.blocks.zero_()
    torch.cuda.synchronize()

    arena.load((3, 0), (10, 11))

    assert [cache.content(11), cache.content(10)] == kept
    assert cache.content(7) == bytes(LAYOUT.block_bytes)


@pytest.mark.parametrize("checksums", (True, False))
def test_evicted_blocks_come_back_through_the_chain(cache: DeviceCache, checksums: bool) -> None:
    woken = threading.Event()
    connector = build_connector(
        ConnectorOptions(
            connector="chain", chain=("host", "nixl"), host_bytes=8 * LAYOUT.block_bytes, checksums=checksums
        ),
        identity=PeerIdentity(engine_id="gpu", incarnation="1"),
        layout=LAYOUT,
        region=cache.region,
        rendezvous=NobodyToMeet(),
        wake=woken.set,
    )
    kept = [cache.content(block_id) for block_id in (1, 2)]
    assert connector.scheduler.tier is not None
    assert not connector.scheduler.tier.keep_evicted((1, 2), (b"first", b"second"))
    connector.worker.execute(connector.scheduler.take_orders())
    cache.blocks.zero_()
    torch.cuda.synchronize()

    match = connector.scheduler.source.match(
        request_id="r", params=None, num_prompt_tokens=9, num_local_tokens=0, block_hashes=((b"first", b"second"),)
    )
    assert match is not None
    assert match.num_tokens == 2 * LAYOUT.block_size
    connector.scheduler.source.begin_load(request_id="r", params=None, first_block=0, block_ids=((8, 9),))
    connector.worker.execute(connector.scheduler.take_orders())
    while not (loads := connector.worker.collect().loads):
        assert woken.wait(WAIT_TIMEOUT_S)
        woken.clear()
    connector.worker.close()

    assert (loads[0].error, loads[0].failed_block_ids) == (None, ())
    assert [cache.content(8), cache.content(9)] == kept
