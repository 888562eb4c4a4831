"""The interface between decode graphs and a GPU; tests without a GPU implement it with a fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]
"""Work on the device that reads and writes the same memory at every call, and allocates only what it returns."""


MAX_DRIVER_BYTES = 64 << 20
"""Most memory that the driver keeps for one graph, on top of the memory that the graph computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """own_bytes: taken by this process's tensors. device_bytes: taken on the whole device, by any process."""

    own_bytes: int
    device_bytes: int

    def growth_since(self, before: MemoryUse) -> int:
        """Bytes that one graph took, the driver's memory included; what other processes took meanwhile is left out."""
        own = self.own_bytes - before.own_bytes
        others = self.device_bytes - before.device_bytes - own
        return max(own, 0) + min(max(others, 0), MAX_DRIVER_BYTES)


class Event(Protocol):
    """A point in the device's order of work."""

    def record(self) -> None:
        """Set this point behind all work queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has passed it; returns at once if it was never recorded."""


class Graph(Protocol):
    """Captured work."""

    @property
    def output(self) -> torch.Tensor:
        """The tensor that the work returned at its capture; each replay overwrites its contents."""

    def replay(self) -> None:
        """Queue the work, as one launch."""


class GraphDevice(Protocol):
    """A device that can capture work. All work is queued in the order of the current stream."""

    def warm_up(self, work: Work) -> None:
        """Run the work once, under the conditions of a capture, so that one-time initialisation is not captured."""

    def capture(self, work: Work) -> Graph:
        """Record the work without running it. All graphs captured since the last ``release`` share memory.

        Raises:
            RuntimeError: The work holds something that cannot be captured, or memory ran out.
        """

    def release(self) -> None:
        """Free the memory of graphs that are no longer referenced; later captures share a new pool."""

    def memory_use(self) -> MemoryUse:
        """The memory in use on the device now."""

    def new_staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device can copy from asynchronously."""

    def new_event(self) -> Event:
        """An event that was not recorded yet."""


class CapturedGraph:
    """A CUDA graph and the tensor that it writes its result to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """See ``Graph``."""
        self._graph.replay()


class CUDAGraphDevice:
    """Captures work as torch's CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        """See ``GraphDevice``. Runs on the capturing stream, since matrix libraries keep a workspace for each
        stream.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def capture(self, work: Work) -> Graph:
        """See ``GraphDevice``. Only this thread must avoid calls that a capture forbids: others may be moving KV."""
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
    """The device's implementation; None if it cannot capture."""
    return CUDAGraphDevice(device) if device.type == "cuda" else None
