"""What decode graphs need of a GPU, as a seam: without one, tests put a double in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]
"""Work on the device that reads and writes the same memory whenever it is called, and allocates what it returns."""


MAX_DRIVER_BYTES = 64 << 20
"""What the driver keeps for one graph beside the memory that it works in, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """own_bytes: what tensors of this process take. device_bytes: what is taken by whomever, for whatever."""

    own_bytes: int
    device_bytes: int

    def growth_since(self, before: MemoryUse) -> int:
        """Bytes that one graph took, by the driver's keeping too; but not what another process took meanwhile."""
        own = self.own_bytes - before.own_bytes
        others = self.device_bytes - before.device_bytes - own
        return max(own, 0) + min(max(others, 0), MAX_DRIVER_BYTES)


class Event(Protocol):
    """A moment in the order of the device's work."""

    def record(self) -> None:
        """Let this be the moment after all that was queued so far."""

    def synchronize(self) -> None:
        """Wait until it has passed; at once if it was never recorded."""


class Graph(Protocol):
    """Captured work."""

    @property
    def output(self) -> torch.Tensor:
        """What the work returned when it was captured; each replay writes its numbers anew."""

    def replay(self) -> None:
        """Queue the work, as one launch."""


class GraphDevice(Protocol):
    """A device that can capture work. Everything is queued in the order of the current stream."""

    def warm_up(self, work: Work) -> None:
        """Do the work once as a capture would, so that what happens only the first time is not captured."""

    def capture(self, work: Work) -> Graph:
        """Record the work without doing it. The memory of all graphs since the last ``release`` is shared.

        Raises:
            RuntimeError: The work holds something that cannot be captured, or memory ran out.
        """

    def release(self) -> None:
        """Give back the memory of graphs that nobody holds any more; later captures share memory of their own."""

    def memory_use(self) -> MemoryUse:
        """What is taken of the device's memory now."""

    def new_staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device can copy from while the host goes on."""

    def new_event(self) -> Event:
        """An event that was not recorded yet."""


class CapturedGraph:
    """A CUDA graph and the memory it leaves its result in."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """See ``Graph``."""
        self._graph.replay()


class CUDAGraphDevice:
    """torch's CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        """See ``GraphDevice``. On the capturing stream: matrix libraries keep a workspace for each."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def capture(self, work: Work) -> Graph:
        """See ``GraphDevice``. Only this thread must keep off what a capture forbids: others may serve transfers."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return CapturedGraph(graph, output)

    def release(self) -> None:
        """See ``GraphDevice``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    def memory_use(self) -> MemoryUse:
        """See ``GraphDevice``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryUse(own_bytes=torch.cuda.memory_reserved(self._device), device_bytes=total - free)

    def new_staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``GraphDevice``."""
        return torch.zeros(num_elements, dtype=dtype, pin_memory=True)

    def new_event(self) -> Event:
        """See ``GraphDevice``."""
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event


def graph_device_of(device: torch.device) -> GraphDevice | None:
    """The device's way to capture; None where there is none."""
    return CUDAGraphDevice(device) if device.type == "cuda" else None
