"""A model of how long an engine's step takes, by what it computes. A worker fits it, and a router predicts with it.
Free of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.versions import across_versions


class StepWork(NamedTuple):
    """What one step computes; a tuple, because one is made in every step.

    num_rows: requests that compute one token of their answer, plus draft tokens to verify.
    num_context_tokens: tokens that these requests attend to, summed.
    num_prompt_tokens: prompt tokens computed.
    num_prompt_reads: tokens that the prompt tokens attend to, summed: x new tokens after L computed ones read L * x +
        x * x / 2.
    """

    num_rows: float = 0.0
    num_context_tokens: float = 0.0
    num_prompt_tokens: float = 0.0
    num_prompt_reads: float = 0.0


def prompt_reads(num_tokens: float, *, after: float) -> float:
    """How many tokens ``num_tokens`` of a prompt read after ``after`` others: these, and half of their own."""
    return num_tokens * (after + num_tokens / 2)


FIRST_CORE_GAIN = 0.5
"""The gain of cores assumed while it is unknown, because all steps so far ran on the same number of cores."""


COMPUTE_CORE_GAIN = 0.9
"""The gain of cores for what prompts and rows add to a step: mostly computing, and little reading of memory, whose
bandwidth all cores share.
"""


ERRORS_KEPT_CLEAR = 5.0
"""Steps aim this many mean prediction errors below the promised gap. Nine of ten gaps of a request should keep
the promise, and short answers have few gaps: with 3, a fifth of those beside long prompts did not (simulated, two
workers on two cores).
"""

MAX_ERROR_KEPT_CLEAR = 0.5
"""The largest error that counts here: some of the gap is left for prompts in any case."""


def aim_share(error: float) -> float:
    """The share of a promised gap that steps with prompts aim at; see ``StepTimeModel.error``."""
    return 1.0 / (1.0 + ERRORS_KEPT_CLEAR * min(error, MAX_ERROR_KEPT_CLEAR))


CALM_TIME_SHARE = 0.6
"""All waiting prompts should be computed within this share of the time left to the first one: more may arrive. With 0.4
gaps grew sooner when prompts come in bursts; with 0.7 several routers break more promises (simulated, two to eight
workers).
"""


def calm_room_s(work_s: float, decode_s: float, gap_s: float, left_s: float) -> float:
    """What prompts that have time should take of each step: both they and the streams beside them shall wait little.

    Prompts of ``work_s`` that take x of each step last work_s * (decode_s + x) / x, and the gaps beside them decode_s +
    x. The sum of the first as a share of ``left_s``, the time left to the first token, and of the second as a share of
    ``gap_s``, the promised gap, is least where x is the root of work_s * decode_s * gap_s / left_s. The prompts take
    more if they would otherwise last longer than ``CALM_TIME_SHARE`` of the time left.

    Returns:
        Infinity where they last longer in any case, or a step without them takes no time, or they are not known to.
    """
    spare_s = CALM_TIME_SHARE * left_s - work_s
    if spare_s <= 0.0 or decode_s <= 0.0 or work_s <= 0.0:
        return math.inf
    return max(math.sqrt(work_s * decode_s * gap_s / left_s), work_s * decode_s / spare_s)


def core_speed(cores: float, gain: float) -> float:
    """The speed-up of a worker on ``cores`` times its own cores, with the gain ``gain``; see ``core_gain``."""
    return 1.0 + gain * (cores - 1.0)


LEAST_DELAY = 0.5
"""Steps that take so much longer than predicted, relative to the prediction, are counted as delayed: by other processes
on the same cores, for example.
"""


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Predicts a step's seconds as a sum over what it computes, each part at its price; prices are never negative.

    error: the average error of recent predictions, relative to the longer of the predicted and the actual time. Between
        0 and 1; 0.5 means a factor of 2, too long or too short. 1.0 before any prediction was made.
    num_steps: how many steps were seen; 0 means that nothing is known, and every prediction is 0.
    cores: the number of cores that the prices hold for, in multiples of the worker's own: it may borrow idle workers'.
    core_gain: how much more cores speed up what every step does, reading the weights: with 1.0, twice the cores are
        twice as fast. None: unknown. What rows, their context and prompts add has the gain ``COMPUTE_CORE_GAIN``, so
        steps with many rows gain more than steps with few.
    most_rows: the most requests that computed a token of their answer in any step that the prices come from. What a row
        adds to steps with many more is a guess.
    delayed: the share of steps that something delayed: they took more than 1 + ``LEAST_DELAY`` times the prediction.
    delay: how much longer these took on average, relative to the prediction: 0.8 is 1.8 times as long.

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
    most_rows: float = 0.0
    delayed: float = 0.0
    delay: float = 0.0

    def on(self, cores: float) -> StepTimeModel:
        """The model for steps on ``cores`` times the worker's own cores."""
        if cores == self.cores or self.core_gain is None:
            return self
        reading = core_speed(self.cores, self.core_gain) / core_speed(cores, self.core_gain)
        computing = core_speed(self.cores, COMPUTE_CORE_GAIN) / core_speed(cores, COMPUTE_CORE_GAIN)
        return replace(self.scaled(reading=reading, computing=computing), cores=cores)

    def scaled(self, *, reading: float, computing: float) -> StepTimeModel:
        """The model with other prices: that of reading the weights, and those of what is computed, times a factor."""
        return replace(
            self,
            base_s=reading * self.base_s,
            row_s=computing * self.row_s,
            context_token_s=computing * self.context_token_s,
            prompt_token_s=computing * self.prompt_token_s,
            prompt_read_s=computing * self.prompt_read_s,
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
        """The most tokens of a prompt, after ``after`` computed ones, that lengthen a step by at most ``seconds``."""
        if seconds <= 0.0:
            return 0.0
        linear, square = self.prompt_token_s + self.prompt_read_s * after, self.prompt_read_s / 2
        divisor = linear + math.sqrt(linear * linear + 4.0 * square * seconds)
        return 2.0 * seconds / divisor if divisor else math.inf

    def prompt_seconds(self, num_tokens: float, *, after: float = 0.0, chunk: float = 2048.0) -> float:
        """Predicted time of ``num_tokens`` of a prompt after ``after`` cached ones, alone, in steps of ``chunk``."""
        num_steps = max(-(-num_tokens // chunk), 1.0)
        return (
            self.base_s * num_steps
            + self.prompt_token_s * num_tokens
            + self.prompt_read_s * prompt_reads(num_tokens, after=after)
        )


UNKNOWN_STEP_TIME = StepTimeModel()
"""The model of a worker that has not made enough steps."""
