"""Engines in another process, driven over a pipe: real peers for a connector, that can be stopped and killed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer.errors import HandshakeRefusedError, PeerUnreachableError
from kv_transfer.params import Hello
from tests.support.engine.kv_engine import KVEngine, KVEngineSpec
from tests.support.kv.light_nixl import import_nixl_without_torch

CALL_TIMEOUT_S = 60.0
_TELL_WHERE = signal.SIGUSR1
"""On this signal the process prints the stacks of its threads."""


class NobodyToMeet:
    """The rendezvous of an engine that only waits for others to connect."""

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Refuse."""
        raise PeerUnreachableError(engine_id=engine_id, reason="there is nobody to meet")


def _serve(calls: Connection, meetings: Connection) -> None:
    import_nixl_without_torch()
    faulthandler.register(_TELL_WHERE, all_threads=True)
    engines: dict[str, KVEngine] = {}
    answering = threading.Thread(target=_answer, args=(meetings, engines), daemon=True)
    answering.start()
    _answer(calls, engines)
    for engine in engines.values():
        engine.close()


def _answer(connection: Connection, engines: dict[str, KVEngine]) -> None:
    while True:
        try:
            engine_id, method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "create":
                engines[engine_id] = KVEngine(arguments[0], NobodyToMeet())
                result: object = None
            else:
                result = getattr(engines[engine_id], method)(*arguments)
        except HandshakeRefusedError as error:
            connection.send(("refused", (error.what, error.ours, error.theirs)))
        except Exception as error:
            connection.send(("error", repr(error)))
        else:
            connection.send(("ok", result))


class ChildProcess:
    """A process that holds engines. Calls are answered one after the other, except ``accept``, which has a pipe of
    its own.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        calls, their_calls = context.Pipe()
        meetings, their_meetings = context.Pipe()
        self._lines = {"accept": (meetings, threading.Lock())}
        self._calls = (calls, threading.Lock())
        self.process = context.Process(target=_serve, args=(their_calls, their_meetings), daemon=True)
        self.process.start()
        their_calls.close()
        their_meetings.close()

    def call(self, engine_id: str, method: str, *arguments: Any) -> Any:
        """Call a method of an engine in the process.

        Raises:
            HandshakeRefusedError: The engine raised it.
            PeerUnreachableError: The process is gone or does not answer.
        """
        connection, lock = self._lines.get(method, self._calls)
        with lock:
            try:
                connection.send((engine_id, method, arguments))
                if not connection.poll(CALL_TIMEOUT_S):
                    self.signal(_TELL_WHERE)
                    raise PeerUnreachableError(engine_id=engine_id, reason="no answer")
                kind, result = connection.recv()
            except (EOFError, OSError) as error:
                raise PeerUnreachableError(engine_id=engine_id, reason=f"{error!r}; {self._state()}") from error
        if kind == "refused":
            what, ours, theirs = result
            raise HandshakeRefusedError(what=what, ours=ours, theirs=theirs)
        assert kind == "ok", result
        return result

    def _state(self) -> str:
        """The state of the process, and of the memory that UCX shares between processes."""
        self.process.join(5)
        free = shutil.disk_usage("/dev/shm").free >> 20
        return f"exit code {self.process.exitcode}, {free} MiB free in /dev/shm"

    def create(self, spec: KVEngineSpec) -> ChildEngine:
        """Build an engine in the process."""
        self.call(spec.engine_id, "create", spec)
        return ChildEngine(self, spec)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; one that stops or ends it has done so with all its threads on return."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        elif number is signal.SIGKILL:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Resume the process if a failed test left it stopped."""
        if self.process.is_alive():
            self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the process, by force if necessary."""
        for connection, _ in (self._calls, *self._lines.values()):
            connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class ChildEngine:
    """An engine in a child process, with the methods of ``KVEngine``."""

    def __init__(self, child: ChildProcess, spec: KVEngineSpec) -> None:
        self.child = child
        self.spec = spec

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self.child.call(self.spec.engine_id, method, *arguments)


class PipeRendezvous:
    """Connects to the engines of child processes over their pipes; tests can change which process has an engine."""

    def __init__(self) -> None:
        self.engines: dict[str, ChildEngine | KVEngine] = {}

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Deliver a hello."""
        engine = self.engines.get(engine_id)
        if engine is None:
            raise PeerUnreachableError(engine_id=engine_id, reason="no such engine")
        answer: Hello = engine.accept(hello)
        return answer
