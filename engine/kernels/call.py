"""A compiled kernel with its parameter block, ready to be called again and again."""

from __future__ import annotations

import ctypes

import torch

from engine.kernels.thread_team import ThreadFunction, parallel_region

ELEMENTS_PER_THREAD = 1 << 15
"""A kernel that touches fewer numbers than this runs on the calling thread: waking others takes longer."""


class KernelCall:
    """``parameters`` are what the kernel reads; its first one is the counter that shares the work out.

    One call at a time: whoever owns it fills the parameters and runs.
    """

    def __init__(self, address: int, num_parameters: int) -> None:
        self._address = address
        self._counter = ctypes.c_int64()
        self.parameters = (ctypes.c_int64 * num_parameters)()
        self.parameters[0] = ctypes.addressof(self._counter)
        self._parameters_address = ctypes.addressof(self.parameters)
        self._run_alone = ThreadFunction(address)
        self._enter_team = parallel_region()

    def run(self, *, max_threads: int) -> None:
        """Run on up to ``max_threads`` threads, and wait. Without a team to enter, the calling thread does it all."""
        self._counter.value = 0
        num_threads = min(torch.get_num_threads(), max_threads)
        if num_threads == 1 or self._enter_team is None:
            self._run_alone(self._parameters_address)
        else:
            self._enter_team(self._address, self._parameters_address, num_threads, 0)

    def run_over(self, num_elements: int) -> None:
        """Run on as many threads as that many numbers are worth."""
        self.run(max_threads=1 + num_elements // ELEMENTS_PER_THREAD)
