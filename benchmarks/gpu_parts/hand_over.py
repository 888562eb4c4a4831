"""Two engines in two processes on one device, which hand KV over with NIXL."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu_parts.engine import EngineBench, Settings
from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.frontend.offline import run_requests, step_or_wait
from kv_transfer.connector import Connector, ConnectorBuilder, Rendezvous, WakeCallback
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.factory import build_connector
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.transfer_options import TransportChoice

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 60.0
POLL_S = 0.001


def nixl_builder(engine_id: str, rendezvous: Rendezvous, *, transport: TransportChoice = "network") -> ConnectorBuilder:
    """Builds the connector of one engine."""

    def build(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        return build_connector(
            ConnectorOptions(connector="nixl", transport=transport),
            identity=PeerIdentity(engine_id=engine_id, incarnation="1"),
            layout=layout,
            region=region,
            rendezvous=rendezvous,
            wake=wake,
        )

    return build


class Meeting:
    """The decode engine's rendezvous: the process that prefills, once there is one."""

    def __init__(self) -> None:
        self.prefill: PrefillProcess | None = None

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Deliver a hello."""
        if self.prefill is None:
            raise PeerUnreachableError(engine_id=engine_id, reason="no engine prefills yet")
        answer: Hello = self.prefill.call("accept", hello, timeout_s=timeout_s)
        return answer


class PrefillProcess:
    """An engine in a process of its own."""

    def __init__(self, settings: Settings, transport: TransportChoice) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: dict[str, tuple[Connection, threading.Lock]] = {}
        theirs: list[Connection] = []
        for method in ("prefill", "accept"):
            ours, other = context.Pipe()
            self._lines[method] = (ours, threading.Lock())
            theirs.append(other)
        self._process = context.Process(target=_serve, args=(settings, transport, *theirs), daemon=True)
        self._process.start()
        for other in theirs:
            other.close()
        self.call("prefill", None, timeout_s=START_TIMEOUT_S)

    def prefill(self, request: GenerateRequest) -> TokenDelta:
        """The first token of a request, and where its KV is."""
        delta: TokenDelta = self.call("prefill", request)
        return delta

    def call(self, method: str, argument: object, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method in that process.

        Raises:
            PeerUnreachableError: It failed, or did not answer in time.
        """
        pipe, lock = self._lines[method]
        with lock:
            pipe.send(argument)
            if not pipe.poll(timeout_s):
                raise PeerUnreachableError(engine_id="prefill", reason=f"no answer to {method} within {timeout_s:g} s")
            try:
                is_good, result = pipe.recv()
            except EOFError:
                is_good, result = False, "the process ended"
        if not is_good:
            raise PeerUnreachableError(engine_id="prefill", reason=result)
        return result

    def close(self) -> None:
        """End the process."""
        for pipe, _ in self._lines.values():
            pipe.close()
        self._process.join(CALL_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def prefilling(
    settings: Settings, meeting: Meeting, *, transport: TransportChoice = "network"
) -> Iterator[PrefillProcess]:
    """A process that prefills, connected to the decode engine."""
    process = PrefillProcess(settings, transport)
    meeting.prefill = process
    try:
        yield process
    finally:
        meeting.prefill = None
        process.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """seconds: from the request's arrival at decode to the first token that it samples, including a step. num_bytes:
    bytes moved for it. token_ids: all tokens of the request.
    """

    seconds: float
    num_bytes: int
    token_ids: list[int]


def hand_over(prefill: PrefillProcess, decode: EngineBench, request: GenerateRequest) -> HandOver:
    """Prefill in the other process, decode in this one.

    Raises:
        RuntimeError: The KV did not come over.
    """
    first = prefill.prefill(request)
    core = decode.core
    before = core.stats().transfer
    taken_over = dataclasses.replace(request, output_token_ids=first.token_ids, kv_transfer=first.kv_transfer)
    started = time.perf_counter()
    core.add_request(taken_over)
    token_ids, seconds = list(first.token_ids), 0.0
    while core.has_unfinished():
        for delta in step_or_wait(core):
            seconds = seconds or time.perf_counter() - started
            token_ids += delta.token_ids
    after = core.stats().transfer
    if after.num_failed_loads > before.num_failed_loads or after.num_transfers == before.num_transfers:
        raise RuntimeError(f"the KV was not handed over: before {before}, after {after}")
    return HandOver(seconds=seconds, num_bytes=after.num_bytes - before.num_bytes, token_ids=token_ids)


class _NobodyToMeet:
    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        raise PeerUnreachableError(engine_id=engine_id, reason="this side waits for the other one to connect")


def _serve(settings: Settings, transport: TransportChoice, prefills: Connection, meetings: Connection) -> None:
    try:
        bench = EngineBench(settings, nixl_builder("prefill", _NobodyToMeet(), transport=transport))
    except Exception:
        prefills.recv()
        prefills.send((False, traceback.format_exc()))
        return
    threading.Thread(target=_accept, args=(bench, meetings), daemon=True).start()
    try:
        while True:
            if not prefills.poll(POLL_S):
                bench.core.collect()  # leases that ended
                continue
            request = prefills.recv()
            prefills.send((True, None if request is None else _prefill(bench, request)))
    except (EOFError, OSError):
        bench.close()


def _prefill(bench: EngineBench, request: GenerateRequest) -> TokenDelta:
    deltas = list(run_requests(bench.core, [dataclasses.replace(request, hand_over=True)]))
    if deltas[-1].finish_reason is not FinishReason.HANDED_OVER:
        raise RuntimeError(f"a prompt was not handed over: {deltas[-1]}")
    return deltas[-1]


def _accept(bench: EngineBench, meetings: Connection) -> None:
    assert isinstance(bench.core.connector, TransferWorker)
    while True:
        try:
            hello = meetings.recv()
        except (EOFError, OSError):
            return
        try:
            meetings.send((True, bench.core.connector.accept(hello)))
        except Exception as error:
            meetings.send((False, repr(error)))
