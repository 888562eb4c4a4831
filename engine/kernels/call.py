"""A compiled kernel with its parameter block, ready for repeated calls, and lists of such calls to repeat."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.kernels import call_loop
from engine.kernels.compiled_once import Kernel, compile_now, want
from engine.kernels.thread_team import ThreadFunction, parallel_region, team_function

ELEMENTS_PER_THREAD = 1 << 15
"""A kernel that touches fewer numbers runs on the calling thread alone: waking other threads takes longer."""

TEAM_FUNCTIONS = ("GOMP_barrier", "omp_get_thread_num")
"""What the threads of a list call between its kernels."""


def threads_for(num_elements: int) -> int:
    """The most threads that a kernel over so many numbers justifies."""
    return 1 + num_elements // ELEMENTS_PER_THREAD


class KernelCall:
    """``parameters`` are the kernel's arguments; the first one is the address of the counters that threads take work
    from, which are 0 when a kernel begins.

    ``numbers`` are further arguments, float32; their address is the parameter ``numbers_at``.
    The kernel is compiled by ``compile_wanted``, or by the first run. One call at a time: its owner fills in the
    parameters, then runs.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_parameters: int,
        *,
        num_counters: int = 1,
        numbers_at: int = 0,
        num_numbers: int = 0,
    ) -> None:
        self._kernel = kernel
        self._address = 0
        self._counters = (ctypes.c_int64 * num_counters)()
        self.parameters = (ctypes.c_int64 * num_parameters)()
        self.parameters[0] = ctypes.addressof(self._counters)
        self.numbers_at, self.numbers = numbers_at, (ctypes.c_float * num_numbers)()
        if num_numbers:
            self.parameters[numbers_at] = ctypes.addressof(self.numbers)
        self._parameters_address = ctypes.addressof(self.parameters)
        self._run_alone: Callable[[int], None] = self._compile_and_run
        self._enter_team = parallel_region()
        want(kernel)

    @property
    def num_counters(self) -> int:
        """How many counters the kernel takes work from."""
        return len(self._counters)

    @property
    def address(self) -> int:
        """The address of the kernel; 0 before it is compiled."""
        return self._address

    def run(self, *, max_threads: int) -> None:
        """Run on up to ``max_threads`` threads, and wait; without an OpenMP team, on the calling thread alone."""
        ctypes.memset(self._counters, 0, ctypes.sizeof(self._counters))
        num_threads = min(torch.get_num_threads(), max_threads)
        if num_threads == 1 or self._enter_team is None:
            self._run_alone(self._parameters_address)
        else:
            if not self._address:
                self._compile()
            self._enter_team(self._address, self._parameters_address, num_threads, 0)
        if _recording.calls is not None:
            _recording.calls.append(self, max_threads)

    def run_over(self, num_elements: int) -> None:
        """Run on as many threads as ``num_elements`` numbers justify."""
        self.run(max_threads=threads_for(num_elements))

    def _compile(self) -> None:
        compile_now(self._kernel)
        self._address = self._kernel()
        self._run_alone = ThreadFunction(self._address)

    def _compile_and_run(self, parameters_address: int) -> None:
        self._compile()
        self._run_alone(parameters_address)


CALL_LOOP = partial(call_loop.compiled_call_loop)
"""The kernel that runs the calls of a list."""


class _RecordedCall(NamedTuple):
    kernel: int
    parameters: list[int]
    numbers: list[float]
    numbers_at: int
    num_counters: int
    max_threads: int


class CallList:
    """Kernel calls with the arguments that they had when they were recorded, to run again one after another.

    All run in one parallel region without Python between them. Between two kernels Python takes as long as a small
    kernel, since weights push everything else out of the caches. What lies at the addresses in the parameters must stay
    there.
    """

    def __init__(self) -> None:
        self._calls: list[_RecordedCall] = []
        self._length = 0
        self._table = self._parameters = self._counters = np.empty(0, dtype=np.int64)
        self._numbers = np.empty(0, dtype=np.float32)
        self._loop = KernelCall(CALL_LOOP, call_loop.NUM_PARAMETERS)

    def __len__(self) -> int:
        return self._length

    def append(self, call: KernelCall, max_threads: int) -> None:
        """Add a call as it is now; its kernel is compiled. Not after the first run."""
        assert len(self._calls) == self._length
        numbers = list(call.numbers)
        self._calls.append(
            _RecordedCall(call.address, list(call.parameters), numbers, call.numbers_at, call.num_counters, max_threads)
        )
        self._length += 1

    def run(self) -> None:
        """Run all calls, each on as many threads as it may have."""
        if not self._length:
            return
        if self._calls:
            self._prepare()
        self._counters.fill(0)
        parameters = self._loop.parameters
        has_team = parameters[call_loop.BARRIER] and parameters[call_loop.THREAD_NUMBER]
        parameters[call_loop.NUM_THREADS] = num_threads = torch.get_num_threads() if has_team else 1
        self._loop.run(max_threads=num_threads)

    def _prepare(self) -> None:
        """Move all arguments to a few arrays, and give each call its own counters."""
        calls = self._calls
        self._counters = np.zeros(sum(call.num_counters for call in calls), dtype=np.int64)
        self._numbers = np.array([number for call in calls for number in call.numbers], dtype=np.float32)
        counter, number = self._counters.ctypes.data, self._numbers.ctypes.data
        for call in calls:
            call.parameters[0] = counter
            counter += call.num_counters * self._counters.itemsize
            if call.numbers:
                call.parameters[call.numbers_at] = number
                number += len(call.numbers) * self._numbers.itemsize
        self._parameters = np.array([value for call in calls for value in call.parameters], dtype=np.int64)
        ends = np.cumsum([len(call.parameters) for call in calls])
        places = self._parameters.ctypes.data + self._parameters.itemsize * np.concatenate(([0], ends[:-1]))
        kernels, threads = [call.kernel for call in calls], [call.max_threads for call in calls]
        self._table = np.stack((kernels, places, threads), axis=1)
        parameters = self._loop.parameters
        parameters[call_loop.CALLS], parameters[call_loop.NUM_CALLS] = self._table.ctypes.data, len(calls)
        parameters[call_loop.BARRIER], parameters[call_loop.THREAD_NUMBER] = map(team_function, TEAM_FUNCTIONS)
        calls.clear()


class _Recording(threading.local):
    calls: CallList | None = None


_recording = _Recording()


@contextmanager
def recording() -> Iterator[Callable[[CallList | None], None]]:
    """Until the end, add this thread's kernel calls to a list: the one last given to the yielded function, if any."""

    def into(calls: CallList | None) -> None:
        _recording.calls = calls

    before = _recording.calls
    try:
        yield into
    finally:
        _recording.calls = before
