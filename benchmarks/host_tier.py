"""What the host tier saves and costs: time to first token with a prefix loaded back, compared with computing it.

    python -m benchmarks.host_tier --json benchmarks/results/host_tier.json

A row ``ttft/{tokens}`` is the median time to first token, in milliseconds, of a prompt whose blocks the prefix cache
evicted and the tier holds (the built-in model, one engine, one CPU thread). ``recompute_ms`` is the same without a
tier, ``cached_ms`` with the blocks still in the prefix cache; ``speedup`` is recompute_ms / value. A row
``store/{block}`` is what one evicted block costs the step that reuses it: copy and checksum, in microseconds, of
blocks that are not in the processor's cache; for the built-in model beside computing a block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.builtin_times import MODEL
from benchmarks.kv_source import NUM_BLOCKS, SHAPES, BlockShape, Region
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate
from kv_transfer.connector import Connector, WakeCallback
from kv_transfer.factory import build_connector
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.memory.block_memory import open_block_memory
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PeerIdentity
from kv_transfer.tier.host.arena import build_arena

PROMPT_TOKENS = (64, 256, 512, 900)
BLOCK_SIZE = 16
NUM_REPEATS = 7
HOST_BYTES = 256 << 20


@contextmanager
def builtin_engine(*, num_blocks: int, host_bytes: int) -> Iterator[EngineCore]:
    """The built-in model on one thread, with or without a host tier."""

    def connect(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        fabric = InProcessFabric()
        options = ConnectorOptions(connector="inproc")
        if host_bytes:
            options = ConnectorOptions(connector="chain", chain=("host", "inproc"), host_bytes=host_bytes)
        return build_connector(
            options,
            identity=PeerIdentity(engine_id="engine", incarnation="1"),
            layout=layout,
            region=region,
            rendezvous=fabric,
            wake=wake,
            fabric=fabric,
        )

    core = build_engine(
        EngineConfig(
            model=ModelConfigSource(path=MODEL, device="cpu", dtype="auto", num_threads=1),
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=1, max_model_len=min(num_blocks * BLOCK_SIZE, 2048)),
        ),
        build_connector=connect,
    ).core
    yield core
    core.close()


def prompt_of(seed: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt that shares no block with those of other seeds."""
    rng = random.Random(seed)
    return tuple(rng.randrange(10, 1000) for _ in range(num_tokens))


def ttft_ms(core: EngineCore, prompt: tuple[int, ...], name: str) -> float:
    """Milliseconds until one token of a greedy request is there."""
    request = GenerateRequest(
        request_id=name, prompt_token_ids=TokenIds.of(prompt), sampling=SamplingParams(max_tokens=1, ignore_eos=True)
    )
    started = time.perf_counter()
    generate(core, [request])
    return 1e3 * (time.perf_counter() - started)


def median_ttft_ms(num_tokens: int, *, host_bytes: int, evicts: bool) -> float:
    """Median time to first token of the second request for a prompt, with or without another one that took its blocks
    meanwhile.
    """
    num_blocks = -(-(num_tokens + 1) // BLOCK_SIZE)
    samples = []
    with builtin_engine(num_blocks=num_blocks if evicts else 4 * num_blocks, host_bytes=host_bytes) as core:
        for number in range(NUM_REPEATS + 1):
            prompt = prompt_of(2 * number, num_tokens)
            ttft_ms(core, prompt, f"first-{number}")
            ttft_ms(core, prompt_of(2 * number + 1, num_tokens if evicts else BLOCK_SIZE), f"other-{number}")
            again_ms = ttft_ms(core, prompt, f"again-{number}")
            if number:
                samples.append(again_ms)
        loaded = core.stats().transfer.tiers["host"]["loaded_blocks"]
        assert bool(loaded) == (evicts and host_bytes > 0), f"{loaded} blocks were loaded"
    return statistics.median(samples)


def ttft_row(num_tokens: int) -> Row:
    """The row of a prompt that is loaded back, computed, and still cached."""
    reload_ms = median_ttft_ms(num_tokens, host_bytes=HOST_BYTES, evicts=True)
    recompute_ms = median_ttft_ms(num_tokens, host_bytes=0, evicts=True)
    cached_ms = median_ttft_ms(num_tokens, host_bytes=0, evicts=False)
    return Row(
        name=f"ttft/{num_tokens}",
        value=reload_ms,
        unit="ms",
        detail={"recompute_ms": recompute_ms, "cached_ms": cached_ms, "speedup": recompute_ms / reload_ms},
    )


def store_row(shape: BlockShape, detail: dict[str, float | str]) -> Row:
    """The row of copies into the tier, of more blocks than any CPU cache holds."""
    cache = Region(shape.layout, fill=1)
    region = cache.region
    num_slots = min(NUM_BLOCKS, (512 << 20) // region.block_bytes)
    arena = build_arena(region, host_bytes=num_slots * region.block_bytes)
    memory = open_block_memory(arena.region)
    copies, checksums = [], []
    for repeat in range(5):
        for slot in range(num_slots):
            started = time.perf_counter()
            arena.store((slot,), (slot,))
            copied = time.perf_counter()
            memory.checksums((slot,))
            if repeat:
                copies.append(copied - started)
                checksums.append(time.perf_counter() - copied)
    copy_us, checksum_us = (1e6 * statistics.median(samples) for samples in (copies, checksums))
    return Row(
        name=f"store/{shape.name}",
        value=copy_us + checksum_us,
        unit="us/block",
        detail={"copy_us": copy_us, "checksum_us": checksum_us, **detail},
    )


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    rows = [ttft_row(num_tokens) for num_tokens in PROMPT_TOKENS]
    last = rows[-1]
    block_us = 1e3 * float(last.detail["recompute_ms"]) / (PROMPT_TOKENS[-1] / BLOCK_SIZE)
    builtin, large = (store_row(shape, {}) for shape in SHAPES)
    builtin.detail.update(computing_a_block_us=block_us, percent_of_computing=100 * builtin.value / block_us)
    publish([*rows, builtin, large], packages=("torch", "xxhash"), json_file=options.json, title="Host tier")


if __name__ == "__main__":
    main()
