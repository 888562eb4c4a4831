"""Whether what a random world showed is right: every request ends once, with its own tokens, as its faults explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.contract.messages import FinishReason
from router.settings import RouterSettings
from tests.support.simulation.fault_plan import LOSES_A_WORKER, ON_ROUTERS, TAKES_A_WORKER, Kind, WorldPlan
from tests.support.simulation.fault_world import Answer, Told

PATIENT_S = 600.0
"""The timeout of a request that has all the time it could need."""

MARGIN_S = 0.01
DEFAULTS = RouterSettings()


def wrongs(plan: WorldPlan, told: Told) -> Sequence[str]:
    """All that is wrong with what a world showed."""
    found = [f"{answer.ask}: {what}" for answer in told.answers for what in _wrong_with(plan, answer)]
    unexplained = {name: why for name, why in told.blamed.items() if not _is_hit(plan, name)}
    found += [f"{name} was left out, but no fault hit it: {why}" for name, why in unexplained.items()]
    found += [f"logged: {defect}" for defect in told.defects]
    found += [f"not at rest: {what}" for what in told.unrest]
    return found


def _is_hit(plan: WorldPlan, name: str) -> bool:
    """True if a fault explains why a router left the worker out.

    A new router may know a drained worker by name, and call it when it has left. A dead router gets no answer from a
    worker that comes after its death.
    """
    kinds = {fault.kind for fault in plan.faults}
    if Kind.ROUTER_DIES in kinds and name not in {_name(plan, worker) for worker in range(plan.num_workers)}:
        return True
    explain = LOSES_A_WORKER | {Kind.DRAIN} if kinds & ON_ROUTERS else LOSES_A_WORKER
    return name in {_name(plan, fault.worker) for fault in plan.faults if fault.kind in explain}


def _wrong_with(plan: WorldPlan, answer: Answer) -> Iterator[str]:
    if answer.ended_s is None:
        yield "it never ended"
        return
    took_s = answer.ended_s - answer.sent_s
    if took_s > answer.ask.timeout_s + MARGIN_S:
        yield f"it took {took_s:.3f} s"
    if answer.num_after_finish:
        yield f"{answer.num_after_finish} deltas came after its end"
    if answer.held_by and not plan.faults:
        yield f"{answer.held_by} have something of it long after its end, though nothing was broken"
    if answer.tokens != list(answer.expected[: len(answer.tokens)]):
        yield f"its tokens are {answer.tokens}, not {answer.expected}"
    if answer.error is None:
        if len(answer.tokens) != answer.num_output or answer.finish is not FinishReason.LENGTH:
            yield f"it ended with {answer.finish} after {len(answer.tokens)} of {answer.num_output} tokens"
    elif not _explains(plan, answer, took_s):
        yield f"nothing explains {answer.error} after {took_s:.3f} s: {answer.message}"


def _explains(plan: WorldPlan, answer: Answer, took_s: float) -> bool:
    """True if the request itself, its world's settings or its faults explain the error that ended it."""
    ask, kinds = answer.ask, [fault.kind for fault in plan.faults]
    num_losses = sum(kind in LOSES_A_WORKER for kind in kinds)
    settings = [plan.settings, plan.changed_settings] if Kind.ROUTER_REPLACED in kinds else [plan.settings]
    match answer.error:
        case "cancelled":
            return ask.cancel_after_s is not None or answer.has_lost_router
        case "deadline_exceeded":
            return ask.timeout_s < PATIENT_S and took_s >= ask.timeout_s - MARGIN_S
        case "queue_full":
            return any(item["max_num_queued"] != DEFAULTS.max_num_queued for item in settings)
        case "no_healthy_replica":
            return not plan.spares and any(kind in TAKES_A_WORKER for kind in kinds)
        case "decode_failed":
            return num_losses > DEFAULTS.migration_limit
        case "prefill_failed":
            return num_losses >= DEFAULTS.max_prefill_attempts
        case _:
            return False


def _name(plan: WorldPlan, worker: int) -> str:
    if worker < plan.num_prefill:
        return f"prefill-{worker:03}"
    return f"decode-{worker - plan.num_prefill:03}"
