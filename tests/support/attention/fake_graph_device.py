"""A device without a GPU that captures work by recording its operators, and compares each replay with the recording."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.cuda import CUDAAttention
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.device.graph_device import Event, Graph, MemoryUse, Work
from engine.device.kv_cache import KVCache
from engine.layers.attention_spec import AttentionSpec
from engine.runner.device_parts import DeviceParts
from tests.support.attention.graph_trace import GraphTrace
from tests.support.attention.varlen_double import VarlenDouble, kernels_over


class FakeEvent:
    """Completes when it is waited for."""

    def __init__(self) -> None:
        self.is_pending = False

    def record(self) -> None:
        """See ``Event``. A staging buffer must not be reused while its last copy may still run."""
        assert not self.is_pending, "the host memory was written to before its copy was waited for"
        self.is_pending = True

    def synchronize(self) -> None:
        """See ``Event``."""
        self.is_pending = False


class FakeGraph:
    """Recorded work. A replay must do the same to the same memory; only the memory's content may have changed."""

    def __init__(self, device: FakeGraphDevice, work: Work, trace: GraphTrace, output: torch.Tensor) -> None:
        self._device = device
        self._work = work
        self._trace = trace
        self.output = output.clone().fill_(torch.nan)  # capturing computes nothing
        self.num_replays = 0

    def replay(self) -> None:
        """See ``Graph``."""
        self.num_replays += 1
        output, trace = self._device.trace(self._work)
        for captured, replayed in zip(self._trace.steps, trace.steps, strict=True):
            assert captured == replayed, f"a graph would have done {captured}, not {replayed}"
        self.output.copy_(output)


class FakeGraphDevice:
    """Captures on the CPU. ``fails`` may raise for a batch size; ``bytes_of`` is what a graph of one size takes, and
    ``others_take`` what another process takes whenever one looks.
    """

    def __init__(
        self,
        *,
        fails: Callable[[int], Exception | None] = lambda _: None,
        bytes_of: Callable[[int], int] = lambda _: 0,
        others_take: int = 0,
    ) -> None:
        self._fails = fails
        self._bytes_of = bytes_of
        self._current: GraphTrace | None = None
        self._others_take = others_take
        self._others_bytes = 0
        self._taken: list[int] = []
        self.graphs: dict[int, FakeGraph] = {}
        self.captured_sizes: list[int] = []

    @property
    def num_replays(self) -> dict[int, int]:
        """How often the graph of each batch size was replayed, without those that never were."""
        return {size: graph.num_replays for size, graph in self.graphs.items() if graph.num_replays}

    def trace(self, work: Work) -> tuple[torch.Tensor, GraphTrace]:
        """Run work and record it."""
        with GraphTrace() as trace:
            self._current = trace
            output = work()
        self._current = None
        return output, trace

    def warm_up(self, work: Work) -> None:
        """See ``GraphDevice``."""
        work()

    def capture(self, work: Work) -> Graph:
        """See ``GraphDevice``."""
        output, trace = self.trace(work)
        size = len(output)
        if (error := self._fails(size)) is not None:
            raise error
        self.captured_sizes.append(size)
        self._taken.append(self._bytes_of(size))
        self.graphs[size] = FakeGraph(self, work, trace, output)
        return self.graphs[size]

    def release(self) -> None:
        """See ``GraphDevice``."""
        self._taken.clear()
        self.graphs.clear()

    def memory_use(self) -> MemoryUse:
        """See ``GraphDevice``. The driver uses another tenth of each graph's bytes."""
        self._others_bytes += self._others_take
        own = sum(self._taken)
        return MemoryUse(own_bytes=own, device_bytes=own + own // 10 + self._others_bytes)

    def new_staging(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``GraphDevice``."""
        return torch.zeros(num_elements, dtype=dtype)

    def new_event(self) -> Event:
        """See ``GraphDevice``."""
        return FakeEvent()

    def traced(self, kernel: VarlenKernel) -> VarlenKernel:
        """A kernel as a graph sees it: a single operator, whatever it does inside."""

        def call(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
        ) -> torch.Tensor:
            if self._current is None:
                return kernel(query, key, value, shape, spec)
            tables = (shape.query_starts, shape.seq_lens, shape.key_starts, shape.block_tables)
            numbers = (shape.max_query_len, shape.max_seq_len, spec.scale, spec.window)
            with self._current.opaque("varlen", query, key, value, *tables, *numbers) as note:
                result = kernel(query, key, value, shape, spec)
                note(result)
            return result

        return call

    def attention(self, cache: KVCache, *, block_multiple: int = 1) -> CUDAAttention:
        """The GPU's attention, over a kernel that computes what the real one's documentation says."""
        kernel = self.traced(VarlenDouble(block_multiple=block_multiple))
        return CUDAAttention(cache, kernels=kernels_over(kernel, cache))

    def parts(self, *, block_multiple: int = 1) -> DeviceParts:
        """A runner's parts that go through this device."""
        return DeviceParts(
            build_attention=lambda cache: self.attention(cache, block_multiple=block_multiple),
            graph_device=lambda _: self,
        )
