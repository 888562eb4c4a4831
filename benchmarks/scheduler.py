"""The scheduler alone: no model, tokens given, end-of-sequence ignored. Figures are medians in microseconds.

    python -m benchmarks.scheduler --json benchmarks/results/scheduler.json

``decode_step/N`` is schedule + update + statistics of a step in which N running requests take one token each, averaged
over a period of 16 steps (in which every request fills, hashes and is given one block), median over periods;
``steady_us`` is the median of single steps. ``decode_step/N/messages`` adds the message for every request.
``decode_step/64/waiting=M`` and ``.../loading=M``: the same with M more requests that wait, or whose KV is on its way.
``admit/*`` is what one more 1,024-token prompt adds from ``add_request`` to the end of ``schedule``.
``alloc_free/64`` takes 64 blocks, evicting cached ones, publishes them and gives them back. The reference, in
``reference_us``, is vLLM 0.33's scheduler measured the same way on this class of machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.arguments import at_least, count
from benchmarks.report import Row, add_json_option, publish
from engine.contract.block_hash import hash_chain, root_hash
from engine.contract.config import CacheConfig, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.step import ModelRunnerOutput, SchedulerOutput
from engine.contract.token_ids import TokenIds
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.scheduler import Scheduler
from kv_transfer.cache_groups import GroupBlocks
from kv_transfer.connector import NO_ORDERS, ConnectorOrders, SchedulerConnector
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, KVTransferParams, PeerIdentity
from kv_transfer.protocols import RemoteMatch

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 1024
REFERENCE_US = {
    "decode_step/64": 500.0,
    "decode_step/256": 1960.0,
    "decode_step/1024": 8490.0,
    "admit/hit": 236.0,
    "admit/cold": 260.0,
    "alloc_free/64": 65.0,
    "alloc_free/64/no_prefix_cache": 16.0,
}


class NeverEndingLoads:
    """A source, producer and consumer that offers every prompt, and whose loads never end."""

    can_stream = False

    def expect(self, params: KVTransferParams) -> None:
        """Nothing to keep alive."""

    def pass_on(self, params: KVTransferParams) -> None:
        """Nothing was kept alive."""

    def match(
        self,
        *,
        request_id: str,  # noqa: ARG002  (the Protocol's signature)
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),  # noqa: ARG002
    ) -> RemoteMatch | None:
        """Offer the whole prompt."""
        return RemoteMatch(num_tokens=num_prompt_tokens - num_local_tokens if params is not None else 0)

    def begin_load(
        self, *, request_id: str, params: KVTransferParams | None, first_block: int, block_ids: GroupBlocks
    ) -> None:
        """Never end."""

    def load_streamed(
        self,
        *,
        stream_id: str,
        request_id: str,
        params: KVTransferParams,
        first_block: int,
        block_ids: tuple[int, ...],
    ) -> None:
        """Nothing streams."""

    def begin_stream(
        self,
        *,
        stream_id: str,  # noqa: ARG002
        request_id: str,  # noqa: ARG002
        params: KVStreamParams,  # noqa: ARG002
        first_block: int,  # noqa: ARG002
        block_ids: GroupBlocks,  # noqa: ARG002
    ) -> bool:
        """Stream nothing."""
        return False

    def cancel_stream(self, stream_id: str) -> bool:  # noqa: ARG002
        """Nothing streams."""
        return True

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Nobody listens."""

    def withdraw(self, request_id: str) -> None:
        """Nothing was announced."""

    def cancel_load(self, request_id: str) -> None:
        """Nothing to cancel."""

    def release(self, params: KVTransferParams) -> None:
        """Nothing to release."""

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Grant a lease that nobody reads."""
        assert block_ids
        return hand_over_params(request_id, num_tokens)

    def abort_lease(self, request_id: str) -> None:
        """Nothing to abort."""

    def take_orders(self) -> ConnectorOrders:
        """Order nothing."""
        return NO_ORDERS


def hand_over_params(name: str, num_tokens: int) -> KVTransferParams:
    """Parameters of a prompt's KV on a peer."""
    return KVTransferParams(
        protocol_version=PROTOCOL_VERSION,
        source=PeerIdentity(engine_id="peer", incarnation="1"),
        lease_id=name,
        layout_hash="layout",
        block_ids=(tuple(range(-(-num_tokens // BLOCK_SIZE))),),
        num_tokens=num_tokens,
    )


def request(name: str, prompt: tuple[int, ...], *, is_remote: bool = False) -> GenerateRequest:
    """A request that never ends by itself."""
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(prompt),
        sampling=SamplingParams(max_tokens=1 << 20, ignore_eos=True),
        kv_transfer=hand_over_params(name, len(prompt)) if is_remote else None,
    )


def random_prompt(rng: np.random.Generator, num_tokens: int) -> tuple[int, ...]:
    """Token ids that no other prompt shares."""
    return tuple(rng.integers(0, 32_000, num_tokens).tolist())


def make_scheduler(*, num_running: int, num_blocks: int, max_num_seqs: int | None = None) -> Scheduler:
    """A scheduler whose token budget fits ``num_running`` prompts at once."""
    loads = NeverEndingLoads()
    return Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=max(num_running * PROMPT_TOKENS, 4 * LONG_PROMPT_TOKENS),
            max_num_seqs=max_num_seqs or num_running,
            max_num_waiting=1 << 20,
        ),
        CacheConfig(block_size=BLOCK_SIZE),
        num_blocks=num_blocks,
        max_model_len=4096,
        connector=SchedulerConnector(source=loads, producer=loads, consumer=loads, take_orders=loads.take_orders),
    )


def run_step(scheduler: Scheduler, sampled: ModelRunnerOutput | None = None) -> SchedulerOutput:
    """Make one step, whose model samples token 7 everywhere."""
    output = scheduler.schedule()
    result = sampled or ModelRunnerOutput(sampled_token_ids=np.full(output.rows.size, 7, np.int32))
    scheduler.update(output, result)
    return output


def fill_scheduler(num_running: int, *, num_steps: int, num_waiting: int, num_loading: int) -> Scheduler:
    """A scheduler with the given numbers of decoding requests, and of further requests that wait or load."""
    rng = np.random.default_rng(0)
    blocks_each = (PROMPT_TOKENS + num_steps) // BLOCK_SIZE + 3
    scheduler = make_scheduler(
        num_running=num_running,
        num_blocks=num_running * blocks_each + num_loading * (PROMPT_TOKENS // BLOCK_SIZE + 2) + 1024,
        max_num_seqs=num_running + (1 if num_loading else 0),
    )
    for index in range(num_running):
        scheduler.add_request(request(f"r{index}", random_prompt(rng, PROMPT_TOKENS)))
    run_step(scheduler)
    for index in range(num_waiting + num_loading):
        message = request(f"o{index}", random_prompt(rng, PROMPT_TOKENS), is_remote=num_loading > 0)
        scheduler.add_request(message)
    run_step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_loading) == (num_running, num_waiting, num_loading)
    return scheduler


def decode_step(
    num_running: int, *, num_steps: int, with_messages: bool = False, num_waiting: int = 0, num_loading: int = 0
) -> Row:
    """The cost of a decode step."""
    scheduler = fill_scheduler(num_running, num_steps=num_steps, num_waiting=num_waiting, num_loading=num_loading)
    result = ModelRunnerOutput(sampled_token_ids=np.full(num_running, 7, np.int32))
    durations = []
    for _ in range(num_steps):
        started = time.perf_counter()
        output = scheduler.schedule()
        step_result = scheduler.update(output, result)
        scheduler.stats()
        if with_messages:
            step_result.deltas_by_client()
        durations.append(time.perf_counter() - started)
        assert output.rows.size == num_running
    periods = [statistics.fmean(durations[at : at + BLOCK_SIZE]) for at in range(0, num_steps, BLOCK_SIZE)]
    name = f"decode_step/{num_running}"
    name += "/messages" if with_messages else ""
    name += f"/waiting={num_waiting}" if num_waiting else ""
    name += f"/loading={num_loading}" if num_loading else ""
    value = statistics.median(periods)
    return us_row(name, value, steady_us=statistics.median(durations) * 1e6, per_request_us=value * 1e6 / num_running)


def admit(name: str, *, is_hit: bool, num_repeats: int) -> Row:
    """Median of one 1,024-token prompt, from ``add_request`` to the end of the step's ``schedule``."""
    rng = np.random.default_rng(1)
    scheduler = make_scheduler(num_running=16, num_blocks=64 * (num_repeats + 16))
    prompt = random_prompt(rng, LONG_PROMPT_TOKENS)
    scheduler.add_request(request("first", prompt))
    run_step(scheduler)
    durations = []
    for index in range(num_repeats):
        message = request(f"r{index}", prompt if is_hit else random_prompt(rng, LONG_PROMPT_TOKENS))
        started = time.perf_counter()
        scheduler.add_request(message)
        output = scheduler.schedule()
        durations.append(time.perf_counter() - started)
        assert output.num_tokens == 1 + (BLOCK_SIZE if is_hit else LONG_PROMPT_TOKENS)
        scheduler.update(output, ModelRunnerOutput(sampled_token_ids=np.full(output.rows.size, 7, np.int32)))
        scheduler.abort(message.request_id)
        run_step(scheduler)
    return us_row(name, statistics.median(durations))


def alloc_free(name: str, *, enable_prefix_caching: bool, num_repeats: int) -> Row:
    """Median of taking 64 blocks and giving them back, published in between if there is a prefix cache."""
    rng = np.random.default_rng(2)
    kv_cache = KVCacheManager(num_blocks=1024, block_size=BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
    root = root_hash()
    durations = []
    for _ in range(num_repeats):
        hashes = hash_chain(root, rng.integers(0, 32_000, LONG_PROMPT_TOKENS).astype(np.int32), BLOCK_SIZE)
        started = time.perf_counter()
        block_ids = kv_cache.allocate(64)
        if enable_prefix_caching:
            kv_cache.publish([block_ids], hashes, root, b"")
        kv_cache.release(block_ids)
        durations.append(time.perf_counter() - started)
    return us_row(name, statistics.median(durations))


def us_row(name: str, seconds: float, **detail: float | str) -> Row:
    """A row in microseconds, with the reference value if there is one."""
    value = seconds * 1e6
    reference = REFERENCE_US.get(name)
    if reference is not None:
        detail |= {"reference_us": reference, "speedup": reference / value}
    return Row(name=name, value=value, unit="us", detail=detail)


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=at_least(BLOCK_SIZE), default=480, help="decode steps for each row (a multiple of 16)"
    )
    parser.add_argument("--repeats", type=count, default=200, help="admissions and allocations for each row")
    add_json_option(parser)
    options = parser.parse_args()
    step = partial(decode_step, num_steps=options.steps // BLOCK_SIZE * BLOCK_SIZE)
    repeats = options.repeats
    measures: list[Callable[[], Row]] = [
        partial(step, 64),
        partial(step, 256),
        partial(step, 1024),
        partial(step, 64, with_messages=True),
        partial(step, 1024, with_messages=True),
        partial(step, 64, num_waiting=1_000),
        partial(step, 64, num_waiting=10_000),
        partial(step, 64, num_loading=1_000),
        partial(step, 64, num_loading=10_000),
        partial(admit, "admit/hit", is_hit=True, num_repeats=repeats),
        partial(admit, "admit/cold", is_hit=False, num_repeats=repeats),
        partial(alloc_free, "alloc_free/64", enable_prefix_caching=True, num_repeats=10 * repeats),
        partial(alloc_free, "alloc_free/64/no_prefix_cache", enable_prefix_caching=False, num_repeats=10 * repeats),
    ]
    publish(
        [measure() for measure in measures], packages=("numpy", "xxhash"), json_file=options.json, title="Scheduler"
    )


if __name__ == "__main__":
    main()
