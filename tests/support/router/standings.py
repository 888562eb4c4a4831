"""Replicas as placement sees them, for its tests."""

from __future__ import annotations

from hypothesis import strategies as st

from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.role import Work
from engine.contract.step_time import StepTimeModel
from router.placement.fleet import Fleet, Standing, Standings, prices_of, standing_at
from router.placement.prediction import NEVER, Cost, Prediction, Wish, cost, predict, promised_seconds
from router.roles import role_for

MODEL = StepTimeModel(
    base_s=0.005, row_s=0.0005, context_token_s=1e-7, prompt_token_s=0.0002, prompt_read_s=1e-9, error=0.1, num_steps=99
)


def standing(model: StepTimeModel = MODEL, **changes: float) -> Standing:
    """An idle replica that leans to streams."""
    idle = Standing(100.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, *prices_of(model))
    busy = bool(changes.keys() & {"num_rows", "queued_tokens"})
    role = role_for(Work.PROMPT if changes.get("leans_to_prompts") else Work.STREAM)
    return idle._replace(**{"is_idle": float(not busy), "least_prompt_share": role.prompt_share, **changes})


def fleet_of(*replicas: Standing) -> Standings:
    """Replicas as one choice sees them."""
    fleet = Fleet()
    slots = [fleet.take_slot() for _ in replicas]
    for slot, replica in zip(slots, replicas, strict=True):
        fleet.write(slot, replica)
    return fleet.standings(slots)


def wish_of(num_prompt_tokens: int, num_new_tokens: float, *, promise: Promise = NO_PROMISE, **others: float) -> Wish:
    """A wish to be placed, with a promise in milliseconds."""
    ttft_s, itl_s = promised_seconds(promise.ttft_ms), promised_seconds(promise.itl_ms)
    return Wish(float(num_prompt_tokens), num_new_tokens, ttft_s=ttft_s, itl_s=itl_s, **others)


WISHES = st.builds(
    wish_of,
    num_prompt_tokens=st.integers(1, 30_000),
    num_new_tokens=st.integers(0, 2000).map(float),
    num_blocks=st.integers(0, 120).map(float),
    num_prompt_blocks=st.integers(0, 120).map(float),
    promise=st.builds(Promise, ttft_ms=st.none() | st.floats(1, 60_000), itl_ms=st.none() | st.floats(1, 1000)),
    hand_over_s=st.floats(0, 1),
    key=st.integers(0, 2**32 - 1).map(float),
)
"""Any request with or without a promise, whose prompt may not be split."""


def predictions(fleet: Standings, wish: Wish) -> list[Prediction]:
    """Predictions for each replica, for a prompt without cached tokens."""
    replicas = [standing_at(fleet, at) for at in range(len(fleet.host))]
    return [predict(replica, wish.num_prompt_tokens, wish.itl_s, 0.0) for replica in replicas]


def costs_at(fleet: Standings, wish: Wish) -> list[Cost]:
    """Costs for each replica, likewise."""
    return [cost(standing_at(fleet, at), wish, 0.0, NEVER, 0.0) for at in range(len(fleet.host))]
