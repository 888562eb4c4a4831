"""How long an engine's step takes, by what it computes: a model that a worker fits and a router predicts by. Free of
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple


class StepWork(NamedTuple):
    """What one step computes; a tuple, since one is made in every step.

    num_rows: requests that get one token, the next of their answers, and draft tokens that are verified.
    num_context_tokens: tokens that these requests read, all together.
    num_prompt_tokens: tokens of prompts.
    num_prompt_reads: tokens that those read, all together: x new ones behind L that are computed read L * x + x * x / 2
        of them.
    """

    num_rows: float = 0.0
    num_context_tokens: float = 0.0
    num_prompt_tokens: float = 0.0
    num_prompt_reads: float = 0.0


def prompt_reads(num_tokens: float, *, after: float) -> float:
    """What ``num_tokens`` of a prompt read that come ``after`` so many: those, and on average half of themselves."""
    return num_tokens * (after + num_tokens / 2)


FIRST_CORE_GAIN = 0.5
"""Taken for the gain of cores while nobody knows it: while all steps that were seen had equally many."""


COMPUTE_CORE_GAIN = 0.9
"""The gain of cores in what prompts and rows add to a step: mostly computing, and not reading memory, which all cores
share.
"""


ERRORS_KEPT_CLEAR = 5.0
"""Steps are aimed so many mean errors of predictions below the gap. Nine of ten gaps of a request are to keep it, and
short answers have few: with 3 a fifth of those beside long prompts did not (simulated, two workers on two cores)."""

MAX_ERROR_KEPT_CLEAR = 0.5
"""As if predictions were never worse: some of the gap is left for prompts in any case."""


def aim_share(error: float) -> float:
    """Of a promised gap, what steps with prompts are aimed at; see ``StepTimeModel.error``."""
    return 1.0 / (1.0 + ERRORS_KEPT_CLEAR * min(error, MAX_ERROR_KEPT_CLEAR))


def core_speed(cores: float, gain: float) -> float:
    """How many times as fast as on its own cores a worker computes on ``cores`` times as many; see ``core_gain``."""
    return 1.0 + gain * (cores - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Seconds of a step as a sum of what it computes, each at its price; the prices are never negative.

    error: how far late predictions were off, as a share of the longer of what was predicted and what the step took, on
        average: between 0 and 1, of which 0.5 says a factor of 2, too long or too short; 1.0 before any was made.
    num_steps: steps that were seen; 0 means that nothing is known, and all predictions are 0.
    cores: what a worker computed on when it took so long, in multiples of its own cores: it borrows those of idle ones.
    core_gain: by how much as many cores more as its own make faster what every step takes, to read the weights: 1.0
        twice as fast. None: nobody knows. Of what rows, their context and prompts add it is ``COMPUTE_CORE_GAIN``, so
        that steps with many rows gain more than those with few.
    Source of the form: published simulators of serving engines predict a step's time by sums of these terms.
    """

    base_s: float = 0.0
    row_s: float = 0.0
    context_token_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_read_s: float = 0.0
    error: float = 1.0
    num_steps: int = 0
    cores: float = 1.0
    core_gain: float | None = None

    def on(self, cores: float) -> StepTimeModel:
        """The prices of steps on so many times the worker's own cores."""
        if cores == self.cores or self.core_gain is None:
            return self
        reading = core_speed(self.cores, self.core_gain) / core_speed(cores, self.core_gain)
        computing = core_speed(self.cores, COMPUTE_CORE_GAIN) / core_speed(cores, COMPUTE_CORE_GAIN)
        return replace(
            self,
            base_s=reading * self.base_s,
            row_s=computing * self.row_s,
            context_token_s=computing * self.context_token_s,
            prompt_token_s=computing * self.prompt_token_s,
            prompt_read_s=computing * self.prompt_read_s,
            cores=cores,
        )

    def seconds(self, work: StepWork) -> float:
        """The predicted time of one step."""
        return (
            self.base_s
            + self.row_s * work.num_rows
            + self.context_token_s * work.num_context_tokens
            + self.prompt_token_s * work.num_prompt_tokens
            + self.prompt_read_s * work.num_prompt_reads
        )

    def prompt_tokens_within(self, seconds: float, *, after: float = 0.0) -> float:
        """The most tokens of a prompt, behind ``after`` that are computed, that lengthen a step by so much."""
        if seconds <= 0.0:
            return 0.0
        linear, square = self.prompt_token_s + self.prompt_read_s * after, self.prompt_read_s / 2
        divisor = linear + math.sqrt(linear * linear + 4.0 * square * seconds)
        return 2.0 * seconds / divisor if divisor else math.inf

    def prompt_seconds(self, num_tokens: float, *, after: float = 0.0, chunk: float = 2048.0) -> float:
        """The predicted time of a prompt's tokens that come ``after`` cached ones, alone, in steps of ``chunk``."""
        num_steps = max(-(-num_tokens // chunk), 1.0)
        return (
            self.base_s * num_steps
            + self.prompt_token_s * num_tokens
            + self.prompt_read_s * prompt_reads(num_tokens, after=after)
        )


UNKNOWN_STEP_TIME = StepTimeModel()
"""Of a worker that has not made enough steps."""
