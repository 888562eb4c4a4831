"""A prefill engine without a model in another process, with the interface of one in this process."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine.contract.config import SchedulerConfig
from engine.contract.messages import GenerateRequest, LoadReport, TokenDelta
from engine.frontend.engine_core import EngineCore
from engine.scheduler.step_result import StepResult
from kv_transfer.connector import Connector, Rendezvous, WakeCallback
from kv_transfer.errors import HandshakeRefusedError, PeerUnreachableError
from kv_transfer.factory import build_connector
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.transfer_options import TransportChoice
from tests.support.engine.chain_engine import chain_engine
from tests.support.kv.faulty_pair import fast_clock
from tests.support.kv.kv_child import NobodyToMeet
from tests.support.kv.light_nixl import import_nixl_without_torch

CALL_TIMEOUT_S = 60.0
POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class NixlEngineSpec:
    """How to build an engine over NIXL; can be sent to another process.

    With ``is_fast`` its connector's seconds pass faster than they do.
    """

    engine_id: str
    options: ConnectorOptions
    scheduler: SchedulerConfig
    num_blocks: int = 512
    max_model_len: int = 128
    is_fast: bool = True

    def build(self, rendezvous: Rendezvous) -> EngineCore:
        """An engine of this process."""

        def connect(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
            return build_connector(
                self.options,
                identity=PeerIdentity(engine_id=self.engine_id, incarnation="1"),
                layout=layout,
                region=region,
                rendezvous=rendezvous,
                wake=wake,
                clock=fast_clock if self.is_fast else time.monotonic,
            )

        return chain_engine(
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            scheduler=self.scheduler,
            build_connector=connect,
        )


class PrefillProcess:
    """Holds one engine at a time; the pipe serves as its rendezvous. Calls may come from any thread.

    ``transport`` is what the engines of a test are to use.
    """

    def __init__(self, *, transport: TransportChoice = "network") -> None:
        self.transport: TransportChoice = transport
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._lock = threading.Lock()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def build(self, spec: NixlEngineSpec) -> RemoteEngine:
        """Replace the engine in the process."""
        self.call("build", spec)
        return RemoteEngine(self)

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Deliver a hello."""
        answer: Hello = self.call("accept", hello)
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the process.

        Raises:
            HandshakeRefusedError: The engine raised it.
            PeerUnreachableError: Nobody answers.
        """
        with self._lock:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(CALL_TIMEOUT_S):
                raise PeerUnreachableError(engine_id="prefill", reason=f"no answer to {method}")
            kind, result = self._pipe.recv()
        if kind == "refused":
            what, ours, theirs = result
            raise HandshakeRefusedError(what=what, ours=ours, theirs=theirs)
        assert kind == "ok", result
        return result

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(CALL_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class RemoteEngine:
    """An engine in another process, as ``FaultyPair`` drives it: its steps run by themselves."""

    def __init__(self, process: PrefillProcess) -> None:
        self._process = process
        self._news: list[TokenDelta] = []
        self._num_open = 0
        self._last: LoadReport | None = None

    def add_request(self, request: GenerateRequest) -> None:
        """Accept a request."""
        self._process.call("add", request)
        self._num_open += 1

    def collect(self) -> None:
        """Nothing to do: it collects by itself."""

    def has_work(self) -> bool:
        """True if it has new results."""
        self._news += self._process.call("take")
        return bool(self._news)

    def has_unfinished(self) -> bool:
        """True while the end of a request has not been taken."""
        return self._num_open > 0

    def step(self) -> StepResult:
        """The new results."""
        news, self._news = self._news, []
        self._num_open -= sum(delta.finish_reason is not None for delta in news)
        return StepResult(finished=[("", delta) for delta in news])

    def load_report(self) -> LoadReport:
        """Its load report."""
        if self._last is not None:
            return self._last
        report: LoadReport = self._process.call("report")
        return report

    def check_integrity(self) -> None:
        """Raises an AssertionError when its block books do not balance."""
        self._process.call("check")

    def close(self) -> None:
        """Close its connector, and remember its last report. Idempotent."""
        if self._last is None:
            self._last = self._process.call("close")


class _Child:
    """The child's side: steps the engine, and answers calls between steps."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.deltas: list[TokenDelta] = []

    def build(self, spec: NixlEngineSpec) -> None:
        self.core, self.deltas = spec.build(NobodyToMeet()), []

    def accept(self, hello: Hello) -> Hello:
        assert self.core is not None
        assert isinstance(self.core.connector, TransferWorker)
        return self.core.connector.accept(hello)

    def add(self, request: GenerateRequest) -> None:
        assert self.core is not None
        self.core.add_request(request)

    def take(self) -> list[TokenDelta]:
        taken, self.deltas = self.deltas, []
        return taken

    def report(self) -> LoadReport:
        assert self.core is not None
        return self.core.load_report()

    def check(self) -> None:
        assert self.core is not None
        self.core.scheduler.check_integrity()

    def close(self) -> LoadReport:
        assert self.core is not None
        self.core.close()
        self.core.collect()
        return self.core.load_report()

    def turn(self) -> bool:
        """Make a step if there is work."""
        if self.core is None:
            return False
        self.core.collect()
        if not self.core.has_work():
            return False
        self.deltas += self.core.step().deltas()
        return True


def _serve(pipe: Connection) -> None:
    import_nixl_without_torch()
    child = _Child()
    try:
        while True:
            is_busy = child.turn()
            if not pipe.poll(0 if is_busy else POLL_S):
                continue
            method, arguments = pipe.recv()
            try:
                answer: tuple[str, object] = ("ok", getattr(child, method)(*arguments))
            except HandshakeRefusedError as error:
                answer = ("refused", (error.what, error.ours, error.theirs))
            except Exception as error:
                answer = ("error", repr(error))
            pipe.send(answer)
    except EOFError:
        if child.core is not None:
            child.core.close()
