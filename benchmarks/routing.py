"""Compares the routing policies: a trace replayed over simulated replicas with real block pools.

    python -m benchmarks.routing --trace mooncake-conversation-trace.jsonl --json benchmarks/results/routing.json

The trace has one JSON object a line: timestamp (ms), input_length, output_length (tokens), hash_ids (one per 512-token
block of the prompt; equal ids, equal prefix). Lengths are scaled down by 32, so that a block of the trace is one of 16
tokens, and its time so that prefill would be ``--load`` busy if nothing were cached. Time is simulated; the choices,
the mirrors, the reservations and the block pools are the real ones, and the time of a choice is measured. Rows:
``<metric>/<policy>/replicas=<in each pool>``; ``vs_random`` is the ratio (for hit rates the difference), none where
``random`` has 0. And ``choice_<state>/<policy>/<role>``: one choice among 256 replicas; ``choice_elastic``: one by
predictions, of who computes a prompt and who generates, and ``report_elastic``: taking a report; with
``_shared_hosts`` where two workers each share the cores of a host, and with ``/replicas=2`` among two.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import struct
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.arguments import at_least, count, positive
from benchmarks.report import Row, add_json_option, publish
from benchmarks.simulated_replicas import Events, Job, SimulatedDecode, SimulatedPrefill, SimulatedReplica
from engine.contract.block_hash import NO_KEYS_ROOT, BlockHash, hash_chain
from engine.contract.messages import CacheChanges, GenerateRequest, LoadReport, SamplingParams, WorkerInfo
from engine.contract.promise import Promise
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from router.placement.machine_code import MACHINE_CODE
from router.placement.reason import Reason
from router.policies import policy_names
from router.pool.demand import Demand
from router.pool.elastic_placement import ElasticPlacement
from router.pool.pool import ReplicaPool
from router.pool.united_workers import UnitedWorkers
from router.pool.workers import ReplicaStatus
from router.roles import ROLES
from router.settings import RouterSettings

SCALE = 32
BLOCK_SIZE = 512 // SCALE
NUM_SAMPLES = 60
"""How many times the KV usage of all replicas is sampled, after the first fifth of the time."""
TRACE = Path("mooncake-conversation-trace.jsonl")
STEP_TIME = StepTimeModel(
    base_s=5e-3, row_s=1e-4, context_token_s=1e-8, prompt_token_s=1e-5, prompt_read_s=1e-10, error=0.1, num_steps=1000
)
SETTINGS = RouterSettings(
    report_period_s=3600.0,
    unresponsive_after_s=7200.0,
    stream_silence_timeout_s=7200.0,
    max_mirrored_blocks=2_000_000,
    roles="elastic",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of the trace, scaled."""

    at_s: float
    demand: Demand
    hashes: Sequence[BlockHash]
    num_output_tokens: int


def read_trace(path: Path, num_requests: int) -> list[TraceRequest]:
    """The first requests of a trace."""
    if not path.is_file():
        raise SystemExit(f"there is no trace at {path}: give its file with --trace (its format: see --help)")
    requests: list[TraceRequest] = []
    with path.open() as lines:
        for number, line in zip(range(num_requests), lines, strict=False):
            row = json.loads(line)
            tokens = np.repeat(np.array(row["hash_ids"], np.int32), BLOCK_SIZE)
            message = GenerateRequest(
                request_id=str(number),
                prompt_token_ids=TokenIds.of(tokens.tolist()),
                sampling=SamplingParams(max_tokens=1),
            )
            requests.append(
                TraceRequest(
                    at_s=row["timestamp"] / 1e3,
                    demand=Demand(message),
                    hashes=hash_chain(NO_KEYS_ROOT, tokens, BLOCK_SIZE),
                    num_output_tokens=max(1, row["output_length"] // SCALE),
                )
            )
    return requests


class Names:
    """The pool's view of the simulated workers: names and sizes. Everything else arrives in their reports.

    With ``share_hosts`` each has a core of a host that it shares with the worker of the same number of the other role.
    """

    def __init__(self, sizes: dict[str, int], *, share_hosts: bool = False) -> None:
        self.sizes = sizes
        self._shares_hosts = share_hosts

    def replica_ids(self) -> Sequence[str]:
        """All workers."""
        return tuple(self.sizes)

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:  # noqa: ARG002
        """An idle replica."""
        num_blocks = self.sizes[replica_id]
        info = WorkerInfo(
            role="",
            engine_id=replica_id,
            incarnation="1",
            node_ip="",
            pid=0,
            model_name="",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            block_bytes=1,
            max_model_len=1 << 20,
            vocab_size=1,
            device="cpu",
            dtype="",
        )
        if self._shares_hosts:
            host = replica_id.rsplit("-", 1)[1]
            info = replace(info, node_ip=f"10.0.0.{host}", num_threads=1, num_host_cores=2, borrows_cores=True)
        load = LoadReport(num_blocks=num_blocks, num_free_blocks=num_blocks)
        return ReplicaStatus(replica_id=replica_id, node_ip="", pid=0, state="running", info=info, load=load)


def make_pool(role: str, policy: str, sizes: dict[str, int]) -> ReplicaPool:
    """A real pool that knows its replicas and has reports from all of them; without one it sends them no requests."""
    pool = ReplicaPool(ROLES[role], Names(sizes), policy=policy, settings=SETTINGS, mirrors_cache=True)  # type: ignore[arg-type]
    asyncio.run(_meet(pool))
    for name, num_blocks in sizes.items():
        pool.note_load(name, LoadReport(num_blocks=num_blocks, num_free_blocks=num_blocks))
        pool.note_cache(name, [CacheChanges(first_sequence=0, next_sequence=0, is_snapshot=True)])
    return pool


class World:
    """Replays one trace with one policy and one number of replicas."""

    def __init__(self, policy: str, num_replicas: int, args: argparse.Namespace) -> None:
        self.events = Events()
        self.choice_s: list[float] = []
        self.gaps: list[float] = []
        prefill = {f"p{number:03}": args.prefill_blocks for number in range(num_replicas)}
        small, large = args.decode_blocks
        decode = {f"d{number:03}": large if number % 2 else small for number in range(num_replicas)}
        self.prefill_pool = make_pool("prefill", policy, prefill)
        self.decode_pool = make_pool("decode", policy, decode)
        self.prefill: dict[str, SimulatedReplica] = {
            name: SimulatedPrefill(name, self.events, num_blocks=size, block_size=BLOCK_SIZE, report=self._from_prefill)
            for name, size in prefill.items()
        }
        self.decode: dict[str, SimulatedReplica] = {
            name: SimulatedDecode(name, self.events, num_blocks=size, block_size=BLOCK_SIZE, report=self._from_decode)
            for name, size in decode.items()
        }

    def _from_prefill(self, replica: SimulatedReplica) -> None:
        self.prefill_pool.note_load(replica.name, replica.load())
        self.prefill_pool.note_cache(replica.name, [replica.changes()])

    def _from_decode(self, replica: SimulatedReplica) -> None:
        self.decode_pool.note_load(replica.name, replica.load())
        self.decode_pool.note_cache(replica.name, [replica.changes()])

    def arrive(self, request: TraceRequest) -> None:
        """Choose both replicas, like the router: prefill first, then decode."""
        demand = request.demand
        started = time.perf_counter()
        decode = self.decode_pool.choose(demand)
        between = time.perf_counter()
        prefill = self.prefill_pool.choose(demand)
        self.choice_s += [between - started, time.perf_counter() - between]
        assert decode is not None
        assert prefill is not None
        num_blocks = len(request.hashes) + 1
        room = self.decode_pool.reserve(decode, num_blocks=num_blocks)
        num_cached = self.prefill_pool.num_cached_tokens(prefill, demand)
        turn = self.prefill_pool.reserve(prefill, num_tokens=demand.num_tokens - num_cached)

        def hand_over() -> None:
            turn.release()
            room.accepted()
            self.decode[decode.replica_id].submit(self._job(request, on_done=lambda: None))
            room.release()

        turn.accepted()
        self.prefill[prefill.replica_id].submit(self._job(request, on_done=hand_over))

    def _job(self, request: TraceRequest, *, on_done: object) -> Job:
        return Job(
            hashes=request.hashes,
            num_output_tokens=request.num_output_tokens,
            on_done=on_done,  # type: ignore[arg-type]
            sent_at_s=self.events.now_s,
        )

    def run(self, requests: Sequence[TraceRequest], speed: float) -> None:
        """Replay."""
        for request in requests:
            self.events.at(request.at_s / speed, lambda request=request: self.arrive(request))  # type: ignore[misc]
        end_s = requests[-1].at_s / speed
        for number in range(NUM_SAMPLES):
            self.events.at(end_s * (0.2 + 0.8 * number / NUM_SAMPLES), self._sample)
        self.events.run()
        stuck = [replica for replica in (*self.prefill.values(), *self.decode.values()) if replica.load().num_waiting]
        if stuck:
            raise SystemExit(
                f"{stuck[0].name} has {stuck[0].load().num_waiting} requests that do not fit into its "
                f"{stuck[0].kv_cache.num_blocks} blocks: raise --decode-blocks"
            )

    def _sample(self) -> None:
        self.gaps.append(statistics.pstdev(replica.load().kv_usage for replica in self.decode.values()))

    def rows(self, policy: str, num_replicas: int) -> list[Row]:
        """The rows of the results."""

        def hit_rate(replicas: dict[str, SimulatedReplica]) -> float:
            queried = sum(item.num_prompt_tokens for item in replicas.values())
            return 100 * sum(item.num_hit_tokens for item in replicas.values()) / queried

        def mean_wait_ms(replicas: dict[str, SimulatedReplica]) -> float:
            return 1e3 * statistics.fmean([wait for item in replicas.values() for wait in item.waits_s])

        values = {
            "prefill_hit_rate": (hit_rate(self.prefill), "%"),
            "decode_hit_rate": (hit_rate(self.decode), "%"),
            "prefill_queueing": (mean_wait_ms(self.prefill), "ms"),
            "decode_queueing": (mean_wait_ms(self.decode), "ms"),
            "kv_usage_stdev": (100 * statistics.fmean(self.gaps), "points"),
            "choice": (1e6 * statistics.median(self.choice_s), "us"),
        }
        place = f"{policy}/replicas={num_replicas}"
        return [Row(name=f"{name}/{place}", value=value, unit=unit) for name, (value, unit) in values.items()]


def choice_rows(num_replicas: int = 256, num_repeats: int = 50) -> list[Row]:
    """The best time of one choice for a prompt of 8,192 tokens, of which every third replica has another part.

    ``tied`` is a pool without load, in which every criterion has to decide; the best of many, because the machine does
    other things meanwhile.
    """
    message = GenerateRequest(
        request_id="a", prompt_token_ids=TokenIds.of(range(8192)), sampling=SamplingParams(max_tokens=1)
    )
    demands = {"": Demand(message), "/session": Demand(message, session_id="alice")}
    rows: list[Row] = []
    for policy, role in itertools.product(policy_names(), ("prefill", "decode")):
        sizes = {f"{role}-{number:03}": 1000 for number in range(num_replicas)}
        pool = make_pool(role, policy, sizes)
        for number, name in enumerate(sizes):
            keys = demands[""].block_keys(BLOCK_SIZE)[: number if number % 3 == 0 else 0]
            stored = struct.pack(f"<{len(keys)}Q", *keys)
            pool.note_cache(name, [CacheChanges(first_sequence=0, next_sequence=1, stored=stored)])
        for state in ("tied", "loaded"):
            if state == "loaded":
                _load_unevenly(pool)
            for kind, demand in demands.items():
                seconds = min(timeit.repeat(lambda: pool.choose(demand), number=10, repeat=num_repeats)) / 10  # noqa: B023
                rows.append(Row(name=f"choice_{state}{kind}/{policy}/{role}", value=seconds * 1e6, unit="us"))
    return rows


def _load_unevenly(pool: ReplicaPool) -> None:
    source = random.Random(1)
    for replica in pool.replicas:
        load = LoadReport(
            num_blocks=1000,
            num_free_blocks=source.randrange(1000),
            queued_prefill_tokens=source.randrange(9999),
            num_decoding=source.randrange(100),
            num_context_tokens=source.randrange(100_000),
            step_time=STEP_TIME,
            counters={"num_scheduled_tokens": 1e6},
        )
        pool.note_load(replica.replica_id, load)


def elastic_rows(num_replicas: int = 256, num_repeats: int = 50, *, share_hosts: bool = False) -> list[Row]:
    """The best time of one choice by predictions among replicas that are loaded unevenly, likewise.

    The request was promised something, so that every prediction counts.
    """
    halves = {role: {f"{role}-{at:03}": 1000 for at in range(num_replicas // 2)} for role in ("prefill", "decode")}
    workers = UnitedWorkers({role: Names(sizes, share_hosts=share_hosts) for role, sizes in halves.items()})  # type: ignore[dict-item]
    pool = ReplicaPool(
        ROLES["prefill"],
        workers,
        policy="prefix",
        settings=SETTINGS,
        mirrors_cache=True,
        also={ROLES["decode"]: "kv_usage"},
    )
    asyncio.run(_meet(pool))
    message = GenerateRequest(
        request_id="a",
        prompt_token_ids=TokenIds.of(range(8192)),
        sampling=SamplingParams(max_tokens=500),
        promise=Promise(ttft_ms=2000.0, itl_ms=80.0),
    )
    demand = Demand(message)
    for number, replica in enumerate(pool.replicas):
        pool.note_cache(replica.replica_id, [CacheChanges(first_sequence=0, next_sequence=0, is_snapshot=True)])
        keys = demand.block_keys(BLOCK_SIZE)[: number if number % 3 == 0 else 0]
        stored = struct.pack(f"<{len(keys)}Q", *keys)
        pool.note_cache(replica.replica_id, [CacheChanges(first_sequence=0, next_sequence=1, stored=stored)])
    _load_unevenly(pool)
    placement = ElasticPlacement(pool, settings=SETTINGS, num_new_tokens=lambda: 200.0)
    MACHINE_CODE.is_for(num_replicas)
    MACHINE_CODE.wait()
    first = pool.replicas[0]
    placed = placement.place(demand, num_blocks=520)
    if placed is None or placed.reason in (Reason.MODELS_UNKNOWN, Reason.OVERRIDE):
        raise SystemExit(f"no prediction was measured: {placed}")
    told = {
        "choice_elastic": lambda: placement.place(demand, num_blocks=520),
        "report_elastic": lambda: first.report(first.load, 0.0),
    }
    suffix = ("_shared_hosts" if share_hosts else "") + ("" if num_replicas == 256 else f"/replicas={num_replicas}")
    return [
        Row(name=name + suffix, value=min(timeit.repeat(call, number=10, repeat=num_repeats)) / 10 * 1e6, unit="us")
        for name, call in told.items()
    ]


async def _meet(pool: ReplicaPool) -> None:
    await asyncio.gather(*pool.refresh())


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add to each row the ratio to ``random`` with the same number of replicas."""
    by_name = {row.name: row.value for row in rows}
    out: list[Row] = []
    for row in rows:
        metric, policy, place = row.name.split("/")
        base = by_name.get(f"{metric}/random/{place}")
        if base is None or policy == "random" or metric == "choice":
            out.append(row)
            continue
        if metric.endswith("hit_rate"):
            row.detail["vs_random"] = row.value - base
        elif base:
            row.detail["vs_random"] = row.value / base
        out.append(row)
    return out


def main() -> None:
    """Replay and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="file of the trace; default: %(default)s here")
    parser.add_argument("--requests", type=at_least(2), default=6000, help="number of requests of the trace to replay")
    parser.add_argument("--replicas", type=count, nargs="+", default=[4, 16, 256], help="replicas in each pool")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policy_names(),
        default=["random", *(n for n in policy_names() if n != "random")],
    )
    parser.add_argument("--load", type=positive, default=0.9, help="share of prefill's time without caching")
    parser.add_argument("--prefill-blocks", type=count, default=8000, help="KV blocks of a prefill replica")
    parser.add_argument(
        "--decode-blocks", type=count, nargs=2, default=[700, 1400], help="alternating KV blocks of decode replicas"
    )
    add_json_option(parser)
    args = parser.parse_args()
    requests = read_trace(args.trace, args.requests)
    num_tokens = sum(request.demand.num_tokens for request in requests)
    rows: list[Row] = []
    for num_replicas in args.replicas:
        busy_s = num_tokens / (SimulatedPrefill.tokens_per_s * num_replicas)
        speed = requests[-1].at_s * args.load / busy_s
        for policy in args.policies:
            world = World(policy, num_replicas, args)
            world.run(requests, speed)
            rows += world.rows(policy, num_replicas)
    rows = with_ratios(rows) + choice_rows()
    for num_replicas, share_hosts in itertools.product((256, 2), (False, True)):
        rows += elastic_rows(num_replicas, share_hosts=share_hosts)
    publish(rows, packages=("numpy", "xxhash"), json_file=args.json, title="Choice of replicas")


if __name__ == "__main__":
    main()
