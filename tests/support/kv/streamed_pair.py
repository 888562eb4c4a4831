"""Runs requests through a pair of engines that hand prompts over while they are computed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from engine.contract.errors import RequestRefusedError
from engine.contract.messages import GenerateRequest
from engine.frontend.engine_core import EngineCore
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, PeerIdentity
from tests.support.kv.faulty_pair import WAIT_TIMEOUT_S, Answers, FaultyPair

MAX_IN_PREFILL = 4


def run_streamed(
    pair: FaultyPair[EngineCore],
    requests: Sequence[GenerateRequest],
    *,
    abort_probability: float = 0.0,
    may_prefill: Callable[[], bool] = lambda: True,
) -> tuple[Answers, set[str]]:
    """The answers to requests that are announced to decode when their prefill begins, and those aborted meanwhile.

    Prefill takes its next step when ``may_prefill`` says so, decode and the connectors whenever they can.
    """
    answers = Answers(tokens={request.request_id: [] for request in requests})
    pending = {request.request_id: request for request in requests}
    waiting = list(reversed(requests))
    aborted: set[str] = set()
    rng = random.Random(13)
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    while waiting or pair.prefill.has_unfinished() or pair.decode.has_unfinished():
        while waiting and _num_in_prefill(pair) < MAX_IN_PREFILL:
            _begin(pair, waiting.pop())
        deltas = (pair.step(pair.prefill) if may_prefill() else []) + pair.step(pair.decode)
        for delta in deltas:
            pair.take(delta, answers, pending)
        if rng.random() < abort_probability:
            aborted.add(rng.choice(requests).request_id)
            pair.prefill.abort(aborted)
            pair.decode.abort(aborted)
        if not deltas:
            assert time.monotonic() < deadline_s, f"stuck: {pair.reports()}"
            pair.decode.wake.wait(0.001)
            pair.decode.wake.clear()
    pair.decode.abort(pending)
    return answers, aborted


def until_read_early(pair: FaultyPair[EngineCore], counter: str = "num_blocks") -> Callable[[], bool]:
    """Holds prefill back once it has announced something, until a counter of decode's early reads grows."""

    def may_prefill() -> bool:
        prefill, decode = (report.counters for report in pair.reports())
        return not prefill["num_announced_blocks"] or decode[counter] > 0

    return may_prefill


def _num_in_prefill(pair: FaultyPair[EngineCore]) -> int:
    report = pair.prefill.load_report()
    return report.num_running + report.num_waiting


def _begin(pair: FaultyPair[EngineCore], request: GenerateRequest) -> None:
    source = PeerIdentity(engine_id="prefill", incarnation="1")
    notice = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=source, timeout_s=WAIT_TIMEOUT_S)
    with contextlib.suppress(RequestRefusedError):
        pair.decode.add_request(dataclasses.replace(request, kv_stream=notice))
    pair.prefill.add_request(dataclasses.replace(request, hand_over=True))
