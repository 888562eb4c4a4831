"""Why a request went where it went."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The last of these that holds for a choice is told.

    COLOCATED: one worker does all, by the predictions. APART: two do, each what it leans to.
    OVERFLOW_TO_PREFILL: tokens are generated on a worker that leans to prompts, apart from its prompt.
    OVERFLOW_TO_DECODE: the prompt is computed on a worker that leans to tokens, apart from these.
    SPLIT: one worker hands over the beginning of the prompt, which it has cached, and another one does all the rest.
    MODELS_UNKNOWN: no worker has made enough steps to be predicted: the policies chose.
    OVERRIDE: a setting names a policy, or a bound, that is not the default.
    SESSION: the worker of its session generates.
    LEADER: it follows the first choice of its prompt.
    """

    COLOCATED = "colocated"
    APART = "apart"
    OVERFLOW_TO_PREFILL = "overflow_to_prefill"
    OVERFLOW_TO_DECODE = "overflow_to_decode"
    SPLIT = "split"
    MODELS_UNKNOWN = "models_unknown"
    OVERRIDE = "override"
    SESSION = "session"
    LEADER = "leader"
