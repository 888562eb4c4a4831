"""Replicas as placement sees them, for tests of it."""

from __future__ import annotations

import numpy as np

from engine.contract.step_time import StepTimeModel
from router.placement.fleet import Fleet, Standing, Standings, prices_of

MODEL = StepTimeModel(
    base_s=0.005, row_s=0.0005, context_token_s=1e-7, prompt_token_s=0.0002, prompt_read_s=1e-9, error=0.1, num_steps=99
)


def standing(model: StepTimeModel = MODEL, **changes: float) -> Standing:
    """An idle replica that leans to streams."""
    idle = Standing(100.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, *prices_of(model))
    busy = bool(changes.keys() & {"num_rows", "queued_tokens"})
    return idle._replace(**{"is_idle": float(not busy), **changes})


def fleet_of(*replicas: Standing) -> Standings:
    """Replicas as one choice sees them."""
    fleet = Fleet()
    slots = [fleet.take_slot() for _ in replicas]
    for slot, replica in zip(slots, replicas, strict=True):
        fleet.write(slot, replica)
    return fleet.standings(np.array(slots, np.intp))
