"""The child processes that validate grammars: at most two, started on demand, and replaced when one ends."""

from __future__ import annotations

import atexit
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Final

from engine.contract.grammar import READING_STACK_BYTES
from router.grammar.grammar_reader import LENGTH

PROGRAM: Final = Path(__file__).with_name("grammar_reader.py")
MAX_NUM_PROCESSES: Final = 2

CPU_S: Final = 5
"""CPU seconds that a grammar may take: the worst realistic ones of 256 KiB take a quarter of a second."""

WAIT_S: Final = 60.0
"""How long to wait for an answer if the process gets no CPU."""

TOO_LONG: Final = "reading it takes more than"
REMEDY: Final = (
    "ask for a simpler one: fewer patterns that must hold at once (`&`, `allOf`), and smaller counts of repetitions"
)
DEADLY: Final = "it crashed the process that reads grammars (signal {number}); simplify it"


class ReadingGivenUpError(Exception):
    """Nobody wants to know any more what is wrong with a grammar."""


class Reading:
    """One caller's questions to child processes, which may be given up from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def give_up(self) -> None:
        """End the process that answers now, and ask no other one: nobody waits for the answer."""
        with self._lock:
            self._is_given_up = True
            if self._process is not None:
                self._process.kill()

    def begin(self, process: subprocess.Popen[bytes] | None) -> None:
        """Note which process is asked, or that none is.

        Raises:
            ReadingGivenUpError: It was given up.
        """
        with self._lock:
            self._process = process
            if self._is_given_up:
                raise ReadingGivenUpError


class GrammarReaders:
    """Asks the child processes. Call it from any thread; it blocks until the answer is there."""

    def __init__(self, *, cpu_s: int = CPU_S, max_num: int = MAX_NUM_PROCESSES) -> None:
        self._cpu_s = cpu_s
        self._turn = threading.Semaphore(max_num)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def problem_of(self, text: str, reading: Reading | None = None) -> str:
        """What is wrong with a grammar; empty if nothing is.

        Raises:
            ReadingGivenUpError: The reading was given up meanwhile.
        """
        reading = reading or Reading()
        with self._turn:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None or process.poll() is not None:
                process = self._begin()
            try:
                reading.begin(process)
                answer = _ask(process, text)
                reading.begin(None)
            except BaseException:
                _end(process)
                raise
            if answer is None:
                return self._why(process)
            with self._lock:
                self._idle.append(process)
            return answer

    def close(self) -> None:
        """End the idle processes. Later questions start new ones."""
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            _end(process)

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", str(PROGRAM), str(self._cpu_s), str(READING_STACK_BYTES)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _why(self, process: subprocess.Popen[bytes]) -> str:
        """The problem to report for the grammar with which a process ended."""
        _end(process)
        number = -(process.returncode or 0)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return f"{TOO_LONG} {self._cpu_s} s of CPU time; {REMEDY}"
        return DEADLY.format(number=number)


def _ask(process: subprocess.Popen[bytes], text: str) -> str | None:
    """A process's answer; None if the process ended instead, or took too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    data = text.encode()
    try:
        process.stdin.write(LENGTH.pack(len(data)) + data)
        process.stdin.flush()
        # The answer is written in one piece, so once its start is readable, the rest follows.
        if not _is_readable_within(process.stdout, WAIT_S):
            return None
        header = _read(process.stdout, LENGTH.size)
        answer = _read(process.stdout, *LENGTH.unpack(header)) if header is not None else None
    except OSError:
        return None
    return None if answer is None else answer.decode()


def _is_readable_within(pipe: IO[bytes], seconds: float) -> bool:
    """Wait with ``poll``: a busy router has more open files than ``select`` supports."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _read(pipe: IO[bytes], num_bytes: int) -> bytes | None:
    data = pipe.read(num_bytes)
    return data if len(data) == num_bytes else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process: by closing its input, unless it is in the middle of a text."""
    assert process.stdin is not None
    assert process.stdout is not None
    for pipe in (process.stdin, process.stdout):
        try:
            pipe.close()
        except OSError:  # the last bytes written had no reader
            continue
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


READERS: Final = GrammarReaders()
"""The readers that this process shares."""

atexit.register(READERS.close)
