"""The columns of the parity matrix. To add one, say what is built, what is done to it, and what is counted then."""

from __future__ import annotations

from dataclasses import replace

from engine.contract.config import SpeculativeConfig
from engine.drafting.proposer import Drafting
from engine.drafting.registry import make_drafting
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.registry import TIERS
from tests.parity.actions import (
    FEW_BLOCKS,
    after_a_reset_of_decode,
    after_an_eviction,
    changing_roles,
    draining_a_mixed_one,
    draining_a_swapped_one,
    draining_decode,
    halved,
    halved_and_lost,
    killing_a_mixed_one,
    killing_decode,
    killing_prefill,
    moving_while_it_waits,
    once_predicted,
    rebalancing,
    resetting_caches,
    twice,
    while_it_is_computed,
    with_swapped_roles,
    within_a_step,
)
from tests.support.engine.proposers import Remembering
from tests.support.parity.column import Column
from tests.support.parity.setup import BY_LEANING, ELASTIC, LOCAL, PLAIN, RECOMPUTES, STREAMED, Setup, suffering

CHUNK = 32
STEPS_BEFORE = 3
"""Steps of a decode worker before something happens to it: some tokens were sent, and some are still to come."""

DAMAGED = ("decode failed_blocks", "decode recomputed_tokens")
DRAFTS = 3

ONE_ENGINE = Column(
    name="one engine",
    setup=Setup(settings=LOCAL),
    stay=("prefill num_requests", "decode num_preemptions"),
)
"""A decode worker that computes the prompt itself and is left alone: what all others are compared with."""


PATHS = (
    Column(
        name="prefill and decode",
        setup=Setup(),
        grow=("prefill num_leases_done", "decode num_transfers"),
        stay=("decode recomputed_tokens",),
    ),
    Column(
        name="streamed hand over",
        setup=Setup(options=STREAMED, chunk_tokens=CHUNK, steps={"prefill": 2}),
        ask=while_it_is_computed,
        grow=("decode num_streamed_blocks",),
    ),
    Column(
        name="handed over within a step",
        setup=Setup(),
        ask=within_a_step,
        grow=("prefill num_leases_done", "decode num_transfers"),
        stay=("decode recomputed_tokens",),
    ),
    Column(
        name="steps that run ahead",
        setup=Setup(scheduler={"async_scheduling": True}),
        grow=("decode num_transfers",),
        grow_without_beams=("runners num_overlaps",),
    ),
    Column(
        name="drafts",
        setup=Setup(drafting=lambda: Drafting(proposer=Remembering(), max_draft_tokens=DRAFTS)),
        ask=twice,
        grow_without_beams=("decode num_draft_tokens", "decode num_accepted_draft_tokens"),
    ),
    Column(
        name="drafts out of earlier answers",
        setup=Setup(drafting=lambda: make_drafting(SpeculativeConfig(method="suffix", num_tokens=DRAFTS))),
        ask=twice,
        grow_without_beams=("decode num_draft_tokens", "decode num_accepted_draft_tokens"),
    ),
    Column(
        name="drafts of a model",
        setup=Setup(is_own_draft=True),
        grow_without_beams=("decode num_draft_tokens", "decode num_accepted_draft_tokens"),
    ),
    Column(
        name="several decode steps at once",
        setup=Setup(scheduler={"max_decode_steps": 4}),
        grow=("decode num_transfers",),
    ),
    Column(
        name="own prefix cache",
        setup=Setup(settings=LOCAL),
        ask=twice,
        grow_with_caches=("decode prefix_hit_tokens",),
        stay=("prefill num_requests",),
    ),
    Column(
        name="prefix cache of a peer",
        setup=Setup(),
        ask=after_a_reset_of_decode,
        grow=("decode num_transfers",),
        grow_with_caches=("prefill prefix_hit_tokens",),
    ),
    *(
        Column(
            name=f"{tier} tier",
            setup=Setup(tier=tier, num_blocks=FEW_BLOCKS),
            ask=after_an_eviction,
            grow=(f"decode num_{tier}_loaded_blocks",),
            grow_with_caches=(f"prefill num_{tier}_loaded_blocks",),
        )
        for tier in TIERS
    ),
)

FAULTS = (
    Column(name="failed blocks", setup=Setup(options=suffering(FaultOptions(read_fails=1.0))), grow=DAMAGED),
    Column(
        name="corrupted block",
        setup=Setup(options=suffering(FaultOptions(bit_flips=1.0))),
        grow=("decode num_corrupt_blocks", *DAMAGED),
    ),
    Column(
        name="expired lease",
        setup=Setup(options=suffering(FaultOptions(lease_expired=1.0))),
        grow=("prefill num_leases_expired", *DAMAGED),
    ),
    Column(  # where decode reads, another engine answers than the one that it met
        name="replaced source",
        setup=Setup(
            options=suffering(
                FaultOptions(peer_replaced=1.0),
                replace(PLAIN, load_timeout_s=0.3, answer_timeout_s=0.1, lease_ttl_s=0.5),
            )
        ),
        grow=("decode num_injected_faults", *DAMAGED),
        is_left_whole=False,
    ),
    Column(  # decode does not compute what it could not read: prefill does, once more
        name="lost kv prefilled again",
        setup=Setup(
            options=suffering(FaultOptions(schedule=(ScheduledFault(fault=Fault.LEASE_EXPIRED, nth=1),))),
            settings=replace(RECOMPUTES, kv_lost_policy="retry"),
        ),
        grow=("router num_prefill_retries", "decode failed_blocks"),
        is_left_whole=False,
    ),
    Column(
        name="killed prefill worker",
        setup=Setup(num_prefill=2, chunk_tokens=CHUNK, steps={"prefill": 1}),
        ask=killing_prefill,
        grow=("router num_prefill_retries", "prefill num_leases_done"),
    ),
    Column(
        name="killed decode worker",
        setup=Setup(num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=killing_decode,
        grow=("router num_migrations", "decode num_generated_tokens"),
    ),
    Column(
        name="drained decode worker",
        setup=Setup(num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=draining_decode,
        grow=("decode num_moved_out", "router num_drain_moves"),
        stay=("router num_migrations", "decode recomputed_tokens"),
    ),
    Column(
        name="rebalanced mid stream",
        setup=Setup(num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=rebalancing,
        grow=("decode num_moved_out", "router num_ordered_moves"),
        stay=("router num_migrations", "router num_drain_moves", "decode recomputed_tokens"),
    ),
    Column(
        name="moved with a part of its prompt",
        setup=Setup(
            settings=LOCAL,
            num_decode=2,
            steps={"decode": 1},
            scheduler={"long_prefill_token_threshold": CHUNK},
        ),
        ask=rebalancing,
        grow=("decode num_moved_out", "router num_ordered_moves"),
        stay=("router num_migrations", "router num_drain_moves", "prefill num_requests"),
    ),
    Column(
        name="moved while it waits",
        setup=Setup(settings=LOCAL, num_decode=2, steps={"decode": 1}),
        ask=moving_while_it_waits,
        grow_without_beams=("decode num_moved_out", "router num_queue_moves"),
        stay=("router num_migrations", "router num_drain_moves", "decode num_transfers", "decode recomputed_tokens"),
    ),
    Column(
        name="preemption",
        setup=Setup(scheduler={"artificial_preemption_probability": 0.5, "max_num_artificial_preemptions": 3}),
        grow=("decode num_preemptions",),
        is_left_whole=False,
    ),
    Column(name="cache reset", setup=Setup(steps={"decode": STEPS_BEFORE}), ask=resetting_caches),
)

ROLES = (
    Column(
        name="elastic roles",
        setup=Setup(settings=BY_LEANING),
        grow=("router num_placed_override", "prefill num_leases_done", "decode num_transfers"),
        stay=("decode recomputed_tokens",),
    ),
    Column(
        name="elastic roles by predictions",
        setup=Setup(settings=ELASTIC),
        ask=once_predicted,
        stay=(
            "router num_placed_models_unknown",
            "router num_placed_override",
            "prefill recomputed_tokens",
            "decode recomputed_tokens",
        ),
    ),
    Column(name="prompt split", setup=Setup(settings=BY_LEANING), ask=halved, grow=("decode num_transfers",)),
    Column(
        name="prompt split, then killed",
        setup=Setup(settings=BY_LEANING, num_decode=2, steps={"decode": STEPS_BEFORE}),
        ask=halved_and_lost,
        grow=("router num_migrations",),
    ),
    Column(
        name="swapped roles",
        setup=Setup(settings=BY_LEANING),
        ask=with_swapped_roles,
        grow=("decode num_leases_done", "prefill num_transfers"),
        stay=("decode num_transfers", "prefill recomputed_tokens"),
    ),
    Column(
        name="role changed mid-stream",
        setup=Setup(settings=BY_LEANING, steps={"decode": STEPS_BEFORE}),
        ask=changing_roles,
        grow=("decode num_generated_tokens",),
        stay=("router num_migrations", "router num_drain_moves", "decode recomputed_tokens"),
    ),
    Column(
        name="drained prefill worker that generates",
        setup=Setup(settings=BY_LEANING, steps={"prefill": STEPS_BEFORE}),
        ask=draining_a_swapped_one,
        grow=("prefill num_moved_out", "router num_drain_moves"),
        stay=("router num_migrations", "decode recomputed_tokens"),
    ),
    Column(  # the only one left has computed the prompt
        name="killed decode worker with elastic roles",
        setup=Setup(settings=BY_LEANING, steps={"decode": STEPS_BEFORE}),
        ask=killing_decode,
        grow=("router num_migrations", "prefill num_generated_tokens"),
    ),
)

MIXED = (
    # Where workers are as free as each other, routers choose by name: decode workers for streams, mixed ones for
    # prompts.
    Column(
        name="prompt at a mixed worker",
        setup=Setup(num_decode=2, num_mixed=1),
        grow=("mixed num_leases_done", "decode num_transfers"),
        stay=("decode recomputed_tokens",),
    ),
    Column(
        name="killed mixed worker",
        setup=Setup(num_decode=2, num_mixed=1, chunk_tokens=CHUNK, steps={"mixed": 1}),
        ask=killing_a_mixed_one,
        grow=("router num_prefill_retries", "prefill num_leases_done"),
    ),
    Column(
        name="drained decode worker beside a mixed one",
        setup=Setup(num_mixed=1, steps={"decode": STEPS_BEFORE}),
        ask=draining_decode,
        grow=("decode num_moved_out", "router num_drain_moves", "mixed num_transfers"),
        stay=("router num_migrations", "mixed recomputed_tokens"),
    ),
    Column(
        name="mixed workers alone, one drained",
        setup=Setup(num_mixed=2, steps={"mixed": STEPS_BEFORE}),
        ask=draining_a_mixed_one,
        grow=("mixed num_moved_out", "router num_drain_moves", "mixed num_transfers"),
        stay=("router num_migrations", "mixed recomputed_tokens", "prefill num_requests", "decode num_requests"),
    ),
)

COLUMNS = {column.name: column for column in (*PATHS, *FAULTS, *ROLES, *MIXED)}
