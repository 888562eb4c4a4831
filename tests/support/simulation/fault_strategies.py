"""Strategies that draw random worlds."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from engine.contract.promise import NO_PROMISE, Promise
from simulation.layout import EVERY_PROMPT, MAX_JUMP
from tests.support.simulation.fault_plan import Ask, FaultEvent, Kind, WorldPlan

LOAD_S = 4.0
"""Requests come, and faults happen, in so many seconds."""

PROMISES = st.sampled_from(
    [NO_PROMISE, NO_PROMISE, Promise(ttft_ms=2000.0, itl_ms=100.0), Promise(ttft_ms=300.0), Promise(itl_ms=25.0)]
)
TIMES = st.integers(0, 100).map(lambda number: round(number * LOAD_S / 100, 3))
SPANS = st.sampled_from([0.05, 0.4, 1.2, 3.0, 5.5, 6.5, 8.0, 16.0, 40.0])
"""How long faults last: a router gives a worker up after 5 s of silence."""

WEIGHTS = {Kind.KILL: 3, Kind.STOP: 3, Kind.CUT: 3, Kind.DRAIN: 3, Kind.SLOW: 2, Kind.SILENCE: 2, Kind.DAMAGE_LOADS: 2}
DELAYS = st.sampled_from([0.01, 0.1, 0.6, 1.5, 3.0, 7.0, 12.0, 35.0])

ASKS = st.builds(
    Ask,
    at_s=TIMES,
    num_prompt=st.one_of(st.integers(1, 40), st.integers(16, 320)),
    outputs=st.lists(st.one_of(st.integers(1, 12), st.integers(20, 180)), min_size=1, max_size=3),
    router=st.integers(0, 2),
    family=st.sampled_from([None, None, 0, 1]),
    timeout_s=st.sampled_from([600.0] * 10 + [2.0, 0.3]),
    cancel_after_s=st.sampled_from([None] * 12 + [0.0, 0.02, 0.2, 1.0]),
    session_id=st.sampled_from([None, None, None, "a"]),
    priority=st.sampled_from([0, 0, 0, 1]),
    promise=PROMISES,
)

FAULTS = st.builds(
    FaultEvent,
    kind=st.sampled_from([kind for kind in Kind for _ in range(WEIGHTS.get(kind, 1))]),
    at_s=TIMES,
    worker=st.integers(0, 5),
    router=st.sampled_from([None, 0, 1, 2]),
    for_s=SPANS,
    delay_s=DELAYS,
    is_replaced=st.booleans(),
)

SETTINGS = st.fixed_dictionaries(
    {
        "roles": st.sampled_from(["elastic", "fixed"]),
        "local_prefill_tokens": st.sampled_from([0, 0, 32, EVERY_PROMPT]),
        "max_prefill_queue_lead": st.sampled_from([0, 0, 64]),
        "rebalance": st.booleans(),
        "rebalance_min_stay_s": st.just(0.2),
        "rebalance_cooldown_s": st.just(0.2),
        "rebalance_max_kv_usage": st.sampled_from([0.9, 0.4]),
        "prefill_lost_policy": st.sampled_from(["retry", "retry", "recompute"]),
        "kv_lost_policy": st.sampled_from(["cheapest", "retry", "recompute"]),
        "prefill_policy": st.sampled_from(["prefix", "prefix", "prefix", "queued_tokens", "round_robin"]),
        "decode_policy": st.sampled_from(["prefix", "prefix", "prefix", "power_of_two", "random"]),
        "hold_first_tokens": st.booleans(),
        "growth_headroom_tokens": st.sampled_from([64, 8]),
        "max_num_queued": st.sampled_from([1024, 1024, 2]),
        "recovery_wait_s": st.sampled_from([120.0, 120.0, 3.0]),
    }
)


@st.composite
def worlds(draw: st.DrawFn) -> WorldPlan:
    """A world whose faults hit its own workers and routers."""
    settings = draw(SETTINGS)
    num_prefill = draw(st.integers(1, 3))
    num_routers = draw(st.integers(1, 3))
    spares = draw(st.booleans())
    num_decode = draw(st.integers(2 if spares else 1, 3))
    if spares:
        num_prefill = max(num_prefill, 1)
    num_faults = draw(st.sampled_from([0, 1, 2, 4, 4]))
    faults = draw(st.lists(FAULTS, min_size=num_faults, max_size=7 if num_faults else 0))
    return WorldPlan(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_routers=num_routers,
        num_blocks=draw(st.sampled_from([48, 96, 256])),
        chunk=draw(st.sampled_from([32, 128, 512])),
        jump=draw(st.sampled_from([1, 1, MAX_JUMP])),
        max_num_seqs=draw(st.sampled_from([32, 4])),
        max_num_waiting=draw(st.sampled_from([4096, 4096, 2])),
        streamed=draw(st.booleans()),
        are_links=draw(st.booleans()),
        is_warm=draw(st.booleans()),
        share_hosts=draw(st.sampled_from([False, False, True])),
        promise=draw(PROMISES),
        settings=settings,
        changed_settings=draw(SETTINGS),
        asks=draw(st.lists(ASKS, min_size=draw(st.sampled_from([1, 4, 10])), max_size=20)),
        faults=[_fitting(fault, num_prefill, num_decode, num_routers, spares=spares) for fault in faults],
        spares=spares,
        seed=draw(st.integers(0, 99)),
    )


def _fitting(fault: FaultEvent, num_prefill: int, num_decode: int, num_routers: int, *, spares: bool) -> FaultEvent:
    """The fault at a worker and a router of the world, but not at its spared workers."""
    num_workers = num_prefill + num_decode
    hit = [number for number in range(num_workers) if not (spares and number in (0, num_prefill))]
    router = None if fault.router is None else fault.router % num_routers
    return replace(fault, worker=hit[fault.worker % len(hit)], router=router)


KEEPS_WORKERS = [kind for kind in Kind if kind not in (Kind.LEAN, Kind.ADD_WORKER, Kind.STICK)]


@st.composite
def leaning_worlds(draw: st.DrawFn) -> WorldPlan:
    """A world of elastic roles with as many workers after its faults as before; one of each role is spared."""
    num_routers = draw(st.integers(2, 3))
    faults = draw(st.lists(FAULTS.filter(lambda fault: fault.kind in KEEPS_WORKERS), min_size=1, max_size=6))
    settings = {"roles": "elastic"}
    return replace(
        draw(worlds()),
        num_prefill=1,
        num_decode=3,
        num_routers=num_routers,
        promise=Promise(ttft_ms=2000.0, itl_ms=100.0),
        settings=settings,
        changed_settings=settings,
        asks=draw(st.lists(ASKS, max_size=4)),
        faults=[replace(_fitting(fault, 1, 3, num_routers, spares=True), is_replaced=True) for fault in faults],
        spares=True,
    )
