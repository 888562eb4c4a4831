"""Fits a machine to measured outcomes of requests: the prices of steps as deployed, and the cost of hand-overs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.whatif_parts.cases import Measured
from benchmarks.whatif_parts.predict import predicted
from engine.contract.step_time import StepTimeModel
from simulation.machine import Machine
from simulation.outcome import Outcome, percentile

FIRST_STEP = 1.25
NUM_ROUNDS = 5
"""Every knob is multiplied or divided by a factor while that helps; then by the root of that factor, and so on."""

SHARES: Mapping[str, Sequence[float]] = {"ttft": (0.5, 0.9), "hand_over": (0.5, 0.9), "gap": (0.5, 0.9, 0.99)}


PROMPT_PRICES = ("prompt_token_s", "prompt_read_s")
ANSWER_PRICES = ("base_s", "row_s", "context_token_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A property of a machine that is fitted, by a factor."""

    name: str
    turn: Callable[[Machine, float], Machine]


def alone(names: Sequence[str]) -> Callable[[Machine, float], Machine]:
    """A function that scales prices of steps during which no other worker of the host computes."""
    return lambda machine, by: replace(machine, step_time=scaled(machine.step_time, names, by))


def shared(names: Sequence[str]) -> Callable[[Machine, float], Machine]:
    """A function that scales prices of steps during which another worker of the host computes."""

    def turn(machine: Machine, by: float) -> Machine:
        if machine.shared_step_time is None:
            return machine
        return replace(machine, shared_step_time=scaled(machine.shared_step_time, names, by))

    return turn


def scaled(model: StepTimeModel, names: Sequence[str], factor: float) -> StepTimeModel:
    """The model with some prices scaled."""
    return replace(model, **{name: factor * getattr(model, name) for name in names})


def transfer(name: str) -> Callable[[Machine, float], Machine]:
    """A function that scales a property of reads of KV."""
    return lambda machine, by: replace(
        machine, transfer=replace(machine.transfer, **{name: by * getattr(machine.transfer, name)})
    )


KNOBS = (
    Knob(name="prompts alone", turn=alone(PROMPT_PRICES)),
    Knob(name="prompts beside another", turn=shared(PROMPT_PRICES)),
    Knob(name="answers alone", turn=alone(ANSWER_PRICES)),
    Knob(name="answers beside another", turn=shared(ANSWER_PRICES)),
    Knob(name="latency of hand-overs", turn=transfer("latency_s")),
    Knob(name="rate of hand-overs", turn=transfer("bytes_per_s")),
    Knob(name="spread of hand-overs", turn=transfer("spread")),
    Knob(name="noise", turn=lambda machine, by: replace(machine, step_noise=by * machine.step_noise)),
    Knob(name="skew", turn=lambda machine, by: replace(machine, step_skew=by * machine.step_skew)),
    Knob(
        name="router",
        turn=lambda machine, by: replace(
            machine, router=replace(machine.router, accept_s=by * machine.router.accept_s)
        ),
    ),
)
"""All fitted properties; one that is 0 on a machine, such as a spread, stays 0."""


def features(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The compared times of a run, in seconds: first tokens, the gaps after them, and all gaps."""
    values = {
        "ttft": [outcome.ttft_s for outcome in outcomes],
        "hand_over": [outcome.gaps_s[0] for outcome in outcomes if outcome.gaps_s],
        "gap": [gap for outcome in outcomes for gap in outcome.gaps_s],
    }
    return {f"{name} {share:g}": percentile(values[name], share) for name, shares in SHARES.items() for share in shares}


def distance(machine: Machine, runs: Sequence[Measured]) -> float:
    """The error of predictions: the mean absolute logarithm of the ratios of predicted to measured times."""
    sizes: list[float] = []
    for run in runs:
        real, virtual = features(run.outcomes), features(predicted(run, machine))
        sizes += [abs(math.log(virtual[name] / real[name])) for name in real]
    return sum(sizes) / len(sizes)


def fit_machine(machine: Machine, runs: Sequence[Measured], knobs: Sequence[Knob] = KNOBS) -> Machine:
    """The machine with the knobs for which predictions are closest to some runs."""
    best, least = machine, distance(machine, runs)
    for number in range(NUM_ROUNDS):
        step = FIRST_STEP ** (0.5**number)
        for knob in knobs:
            for factor in (step, 1 / step):
                is_better = False
                while (found := distance(turned := knob.turn(best, factor), runs)) < least:
                    best, least, is_better = turned, found, True
                if is_better:
                    break
        print(f"fit, round {number + 1}: predictions are off by {100 * math.expm1(least):.1f} %", flush=True)
    return best
