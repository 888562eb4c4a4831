"""Runs requests through engines in the calling thread: for the command line, tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.frontend.engine_core import EngineCore

IDLE_WAIT_S = 30.0
"""How long a loop waits for a connector's event before it gives up: nothing runs and nothing arrives."""


class StalledError(Exception):
    """Requests are unfinished, but nothing can be done and nothing arrived in time."""


def run_requests(core: EngineCore, requests: Iterable[GenerateRequest]) -> Iterator[TokenDelta]:
    """Yield every delta of ``requests`` until all ended, step by step.

    Raises:
        RequestRefusedError: A request can never be served; those before it stay added.
        StalledError: Nothing moved for ``IDLE_WAIT_S``.
    """
    for request in requests:
        core.add_request(request)
    while core.has_unfinished():
        yield from step_or_wait(core)


def step_or_wait(core: EngineCore) -> list[TokenDelta]:
    """Run one step if there is work; else wait until the connector reports something."""
    core.wake.clear()
    core.collect()
    if core.has_work():
        return core.step().deltas()
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


def generate_disaggregated(
    prefill: EngineCore, decode: EngineCore, requests: Iterable[GenerateRequest]
) -> dict[str, list[int]]:
    """Return the output tokens of each request, prefilled on one engine and decoded on another, in one process."""
    wanted = list(requests)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for delta in run_disaggregated(prefill, decode, wanted):
        outputs[delta.request_id].extend(delta.token_ids)
    return outputs


def run_disaggregated(
    prefill: EngineCore, decode: EngineCore, requests: Iterable[GenerateRequest]
) -> Iterator[TokenDelta]:
    """Yield every delta of ``requests``, prefilled on one engine and decoded on another, in one process.

    Both engines step in turn, so that loads, leases and decoding of different requests overlap as they do when the
    engines are processes.

    Raises:
        RequestRefusedError: A request can never be served.
        StalledError: Nothing moved for ``IDLE_WAIT_S``.
    """
    pending = {request.request_id: request for request in requests}
    for request in pending.values():
        prefill.add_request(dataclasses.replace(request, hand_over=True))
    while prefill.has_unfinished() or decode.has_unfinished():
        moved = False
        for core in (prefill, decode):
            core.collect()
            if not core.has_work():
                continue
            moved = True
            for delta in core.step().deltas():
                if delta.finish_reason is FinishReason.HANDED_OVER:
                    decode.add_request(
                        dataclasses.replace(
                            pending[delta.request_id], output_token_ids=delta.token_ids, kv_transfer=delta.kv_transfer
                        )
                    )
                yield delta
        if not moved and not decode.wake.wait(IDLE_WAIT_S):
            raise StalledError(f"no progress for {IDLE_WAIT_S:.0f} s with unfinished requests")
        decode.wake.clear()
