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

    ``numbers`` are further arguments, float32; their address is the parameter ``numbers_at``. The parameter ``rows_at``
    is the number of rows, if all else stays the same for another number; 0 for none.
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
        rows_at: int = 0,
    ) -> None:
        self._kernel = kernel
        self.rows_at = rows_at
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
        self._run(max_threads)
        if _recording.calls is not None:
            _recording.calls.append(self, max_threads)

    def run_over(self, num_elements: int) -> None:
        """Run on as many threads as ``num_elements`` numbers justify: those of all rows together."""
        max_threads = threads_for(num_elements)
        self._run(max_threads)
        if _recording.calls is not None:
            _recording.calls.append(self, max_threads, num_elements)

    def _run(self, max_threads: int) -> None:
        ctypes.memset(self._counters, 0, ctypes.sizeof(self._counters))
        num_threads = min(torch.get_num_threads(), max_threads)
        if num_threads == 1 or self._enter_team is None:
            self._run_alone(self._parameters_address)
        else:
            if not self._address:
                self._compile()
            self._enter_team(self._address, self._parameters_address, num_threads, 0)

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
    """elements_per_row: what the number of threads depends on; 0 if it is always ``max_threads``."""

    kernel: int
    parameters: list[int]
    numbers: list[float]
    numbers_at: int
    num_counters: int
    max_threads: int
    rows_at: int
    elements_per_row: int


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
        self._rows_at, self._per_row = self._table, self._table
        self._num_rows, self._max_threads = 0, 1
        self._loop = KernelCall(CALL_LOOP, call_loop.NUM_PARAMETERS)

    def __len__(self) -> int:
        return self._length

    def append(self, call: KernelCall, max_threads: int, num_elements: int = 0) -> None:
        """Add a call as it is now, once its kernel is compiled; not after the first run. For ``num_elements`` see
        ``KernelCall.run_over``.
        """
        assert len(self._calls) == self._length
        parameters = list(call.parameters)
        num_rows = parameters[call.rows_at] if call.rows_at else 0
        self._calls.append(
            _RecordedCall(
                kernel=call.address,
                parameters=parameters,
                numbers=list(call.numbers),
                numbers_at=call.numbers_at,
                num_counters=call.num_counters,
                max_threads=max_threads,
                rows_at=call.rows_at,
                elements_per_row=num_elements // num_rows if num_rows else 0,
            )
        )
        self._length += 1

    def can_scale(self, num_rows: int) -> bool:
        """True if all calls were recorded with so many rows and can run with others; asked before the first run."""
        return all(call.rows_at and call.parameters[call.rows_at] == num_rows for call in self._calls)

    def run(self, num_rows: int | None = None) -> None:
        """Run all calls, each on as many threads as it may have. ``num_rows``: with so many rows, if the list
        ``can_scale``.
        """
        if not self._length:
            return
        if self._calls:
            self._prepare()
        if num_rows is not None and num_rows != self._num_rows:
            self._set_rows(num_rows)
        self._counters.fill(0)
        parameters = self._loop.parameters
        has_team = parameters[call_loop.BARRIER] and parameters[call_loop.THREAD_NUMBER]
        num_threads = min(torch.get_num_threads(), self._max_threads) if has_team else 1
        parameters[call_loop.NUM_THREADS] = num_threads
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
        self._max_threads = max(threads)
        self._rows_at = ends - [len(call.parameters) - call.rows_at for call in calls]
        self._per_row = np.array([call.elements_per_row for call in calls], dtype=np.int64)
        parameters = self._loop.parameters
        parameters[call_loop.CALLS], parameters[call_loop.NUM_CALLS] = self._table.ctypes.data, len(calls)
        parameters[call_loop.BARRIER], parameters[call_loop.THREAD_NUMBER] = map(team_function, TEAM_FUNCTIONS)
        calls.clear()

    def _set_rows(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._parameters[self._rows_at] = num_rows
        threads = self._table[:, call_loop.MAX_THREADS]
        np.copyto(threads, 1 + num_rows * self._per_row // ELEMENTS_PER_THREAD, where=self._per_row > 0)
        self._max_threads = int(threads.max())


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
