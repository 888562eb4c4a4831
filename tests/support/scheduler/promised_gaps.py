"""Worlds in which steps take what is predicted: prompts beside requests that were promised a gap."""

from __future__ import annotations

from engine.contract.promise import Promise
from engine.contract.step import SchedulerOutput
from engine.contract.step_time import StepTimeModel
from engine.scheduler.policy.step_timer import work_of
from tests.support.scheduler.fixed_step_time import know_step_times
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

MODEL = StepTimeModel(base_s=0.010, row_s=0.001, prompt_token_s=0.001, error=0.0, num_steps=1)
BLOCK_SIZE = 4
LONG = 100


def make_world(model: StepTimeModel = MODEL, *, budget: int = 64, **options: object) -> SchedulerWorld:
    """Room for everybody."""
    world = SchedulerWorld(
        make_config(seqs=8, budget=budget, **options), num_blocks=400, block_size=BLOCK_SIZE, max_model_len=200
    )
    know_step_times(world.scheduler, model)
    return world


def add_decoding(world: SchedulerWorld, name: str, promise: Promise) -> None:
    """A request past its prompt, with many tokens to come."""
    world.add(make_request(name, 5, max_tokens=90, ignore_eos=True, promise=promise))
    world.step()


def prompt_tokens(output: SchedulerOutput) -> int:
    """The prompt tokens that a step computes."""
    return sum(count for count in output.num_scheduled_tokens.tolist() if count > 1)


def run_step(world: SchedulerWorld) -> int:
    """A step that takes what is predicted; returns its prompt tokens."""
    output = world.schedule()
    world.now_s += world.scheduler.step_time.seconds(work_of(world.scheduler._in_flight[-1].batch))
    while world.in_flight:
        world.complete_step()
    return prompt_tokens(output)
