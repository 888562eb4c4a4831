"""Why a request was placed where it was."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """If several of these hold for a choice, the last one is reported.

    COLOCATED: one worker does all, by the predictions. APART: two share it, each with the work that it leans to.
    OVERFLOW_TO_PREFILL: two workers; the one that generates leans to prefill.
    OVERFLOW_TO_DECODE: two workers; the one that computes the prompt leans to decode.
    SPLIT: one worker hands over the beginning of the prompt, which it has cached, and another one does all the rest.
    MODELS_UNKNOWN: no worker has made enough steps to be predicted, so the policies chose.
    OVERRIDE: a setting names a policy, or a bound, that is not the default.
    SESSION: the worker of the request's session generates.
    LEADER: the request follows the first choice of its prompt.
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
