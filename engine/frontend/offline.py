"""Runs requests through engines in the calling thread: for the command line, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.contract.messages import GenerateRequest, TokenDelta
from engine.frontend.engine_core import EngineCore

IDLE_WAIT_S = 30.0
"""How long to wait for a connector's event before giving up, when no request runs and none arrives."""


class StalledError(Exception):
    """Requests are unfinished, but there is nothing to do, and no event arrived in time."""


def run_requests(core: EngineCore, requests: Iterable[GenerateRequest]) -> Iterator[TokenDelta]:
    """Yield every delta of ``requests``, step by step, until all have ended.

    Raises:
        RequestRefusedError: A request can never be served; those before it stay added.
        StalledError: Nothing happened for ``IDLE_WAIT_S``.
    """
    core.pause()
    for request in requests:
        core.add_request(request)
    while core.has_unfinished():
        yield from step_or_wait(core)


def step_or_wait(core: EngineCore) -> list[TokenDelta]:
    """Run one step if there is work; otherwise wait until the connector reports something."""
    core.wake.clear()
    core.collect()
    if core.has_work():
        return core.step().deltas()
    core.pause()
    if not core.wake.wait(IDLE_WAIT_S):
        raise StalledError(f"no progress for {IDLE_WAIT_S:.0f} s with unfinished requests")
    return []


def generate(core: EngineCore, requests: Iterable[GenerateRequest]) -> dict[str, list[int]]:
    """Return the output tokens of each request on one engine, by request id."""
    wanted = list(requests)
    outputs: dict[str, list[int]] = {request.request_id: list(request.output_token_ids) for request in wanted}
    for delta in run_requests(core, wanted):
        outputs[delta.request_id].extend(delta.token_ids)
    return outputs
