"""A compiled kernel with its parameter block, ready for repeated calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.kernels.compiled_once import Kernel, compile_now, want
from engine.kernels.thread_team import ThreadFunction, parallel_region

ELEMENTS_PER_THREAD = 1 << 15
"""A kernel that touches fewer numbers runs on the calling thread alone: waking other threads takes longer."""


def threads_for(num_elements: int) -> int:
    """The most threads that a kernel over so many numbers justifies."""
    return 1 + num_elements // ELEMENTS_PER_THREAD


class KernelCall:
    """``parameters`` are the kernel's arguments; the first one is the counter that threads take work from.

    The kernel is compiled by ``compile_wanted``, or by the first run. One call at a time: its owner fills in the
    parameters, then runs.
    """

    def __init__(self, kernel: Kernel, num_parameters: int) -> None:
        self._kernel = kernel
        self._address = 0
        self._counter = ctypes.c_int64()
        self.parameters = (ctypes.c_int64 * num_parameters)()
        self.parameters[0] = ctypes.addressof(self._counter)
        self._parameters_address = ctypes.addressof(self.parameters)
        self._run_alone: Callable[[int], None] = self._compile_and_run
        self._enter_team = parallel_region()
        want(kernel)

    def run(self, *, max_threads: int) -> None:
        """Run on up to ``max_threads`` threads, and wait; without an OpenMP team, on the calling thread alone."""
        self._counter.value = 0
        num_threads = min(torch.get_num_threads(), max_threads)
        if num_threads == 1 or self._enter_team is None:
            self._run_alone(self._parameters_address)
        else:
            if not self._address:
                self._compile()
            self._enter_team(self._address, self._parameters_address, num_threads, 0)

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
