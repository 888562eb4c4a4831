"""A decode worker's scheduler, and requests whose prompt was computed elsewhere."""

from __future__ import annotations

from tests.support.engine.strict_runner import kv_values, next_token
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def decode_world(num_blocks: int = 32, **options: object) -> SchedulerWorld:
    """A decode worker's scheduler; blocks hold 4 tokens."""
    return SchedulerWorld(make_config(**options), num_blocks=num_blocks)  # type: ignore[arg-type]


def first_token(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What the prefill worker sampled."""
    return (next_token(kv_values(prompt)[-1]),)


def add_handed_over(world: SchedulerWorld, name: str, prompt: tuple[int, ...], **options: object) -> None:
    """A request whose prompt was computed elsewhere, with the first token."""
    offer = world.connector.offer(prompt)
    world.add(make_request(name, prompt, output=first_token(prompt), kv_transfer=offer, **options))  # type: ignore[arg-type]
