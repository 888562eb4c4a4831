"""Decode steps as captured CUDA graphs: one launch instead of a dozen a layer in eager execution."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.attention.backend import AttentionBackend, DecodeGraphAttention
from engine.contract.errors import CaptureRefusedError, ConfigError
from engine.device.graph_device import Graph, GraphDevice
from engine.device.kv_cache import KVCache
from engine.model.step_context import Forward, StepContext
from engine.runner.decode_buffers import DecodeBuffers
from engine.runner.step_inputs import StepInputs

logger = logging.getLogger(f"baton.{__name__}")

MAX_CAPTURE_S = 60.0
"""Time limit for capturing. Batch sizes that were not captured by then run without a graph."""

PROGRESS_PERIOD_S = 5.0

CAPTURE_FAILURES = (CaptureRefusedError, RuntimeError, ValueError)
"""What backends, torch and CUDA raise for work that cannot be captured; running out of memory is one case."""

UnknownWriter = Callable[[StepInputs, torch.Tensor], None]
"""Writes tokens that the host does not know yet into a step's token ids on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """sizes: batch sizes to capture, ascending. is_required: refuse to start if graphs cannot be captured."""

    sizes: tuple[int, ...]
    max_model_len: int
    is_required: bool = False


class DecodeGraphs:
    """The decode graphs of one model over one cache. Used from one thread.

    A step of decode rows is padded to the next captured batch size (see ``DecodeBuffers`` for the padding). A request
    with draft tokens to verify has one row for each token that it computes. Each row sees the keys before its own
    position; rows of the same request write their keys before any row reads. All other steps, and steps with more rows
    than the largest size, run without a graph.
    A graph keeps the addresses and host numbers of its capture. So its input lies in buffers at fixed addresses, and
    the one number that depends on lengths is fixed to that of the longest possible sequence (``plan_decode``).
    """

    def __init__(
        self,
        device: GraphDevice,
        forward: Forward,
        settings: GraphSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._forward = forward
        self._settings = settings
        self._clock = clock
        self._buffers: DecodeBuffers | None = None
        self._graphs: dict[int, Graph] = {}
        self._has_failed = False

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Batch sizes that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    @torch.inference_mode()
    def measure(self, cache: KVCache, attention: AttentionBackend) -> int:
        """Bytes of device memory that ``capture`` will take, scratch block included; 0 if capturing fails.

        Captures the two largest sizes over a cache of the same shape, then drops them. The largest size allocates the
        memory that all sizes share; each other size adds at most as much as the second one did.
        """
        largest_first = self._settings.sizes[::-1]
        try:
            buffers = self._new_buffers(cache)
            self._device.warm_up(self._work(buffers, attention, largest_first[0]))
            uses = [self._device.memory_use()]
            for size in largest_first[:2]:
                self._graphs[size] = self._capture_one(buffers, attention, size)
                uses.append(self._device.memory_use())
        except CAPTURE_FAILURES as error:
            self._fail(error)
            return 0
        self._drop()
        num_bytes = cache.layout.block_bytes + buffers.num_bytes + uses[1].growth_since(uses[0])
        if len(uses) > 2:
            num_bytes += uses[2].growth_since(uses[1]) * (len(largest_first) - 1)
        return num_bytes

    @torch.inference_mode()
    def capture(self, cache: KVCache, attention: AttentionBackend) -> None:
        """Capture all sizes, largest first: the smaller sizes reuse its memory.

        If capturing fails, steps run without graphs, and one warning says why.

        Raises:
            ConfigError: It fails, and graphs are required.
        """
        if self._has_failed:
            return
        started = self._clock()
        logger.info("capturing decode graphs: batch_sizes=%s", list(self._settings.sizes))
        try:
            self._buffers = self._new_buffers(cache)
            self._capture_all(self._buffers, attention, started)
        except CAPTURE_FAILURES as error:
            self._fail(error)
            return
        logger.info("captured decode graphs: num_graphs=%d in %.1f s", len(self._graphs), self._clock() - started)

    def run(self, inputs: StepInputs, write_unknown: UnknownWriter | None = None) -> torch.Tensor | None:
        """Compute a step with a graph: [num_tokens, hidden_size], as ``forward`` returns; None if no graph fits.

        ``write_unknown`` fills in input tokens that only the device knows yet.

        The result lies in the graph's own memory. It is valid until the next step is queued on the device.
        """
        num_rows = len(inputs.input_ids)
        is_sampled_everywhere = inputs.last_tokens.size == num_rows
        if self._buffers is None or not (inputs.attention.is_decode or is_sampled_everywhere):
            return None
        size = self._size_for(num_rows)
        if size is None:
            return None
        self._buffers.fill(inputs, batch_size=size)
        if inputs.unknown is not None:
            assert write_unknown is not None
            write_unknown(inputs, self._buffers.view(size).input_ids)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:num_rows]

    def _size_for(self, num_rows: int) -> int | None:
        """The next captured size; None if the next size of the ladder was not captured, since padding further costs
        more than a graph saves.
        """
        sizes = self._settings.sizes
        index = bisect.bisect_left(sizes, num_rows)
        return sizes[index] if index < len(sizes) and sizes[index] in self._graphs else None

    def _new_buffers(self, cache: KVCache) -> DecodeBuffers:
        return DecodeBuffers(
            self._device,
            cache,
            max_batch_size=self._settings.sizes[-1],
            max_model_len=self._settings.max_model_len,
        )

    def _capture_all(self, buffers: DecodeBuffers, attention: AttentionBackend, started: float) -> None:
        said = started
        largest_first: Sequence[int] = self._settings.sizes[::-1]
        for index, size in enumerate(largest_first):
            now = self._clock()
            if now - started > MAX_CAPTURE_S:
                logger.warning(
                    "capturing decode graphs takes longer than %.0f s: batches of up to %d rows run without graphs",
                    MAX_CAPTURE_S,
                    size,
                )
                return
            if now - said >= PROGRESS_PERIOD_S:
                said = now
                logger.info("capturing decode graphs: %d of %d", index, len(largest_first))
            self._graphs[size] = self._capture_one(buffers, attention, size)

    def _capture_one(self, buffers: DecodeBuffers, attention: AttentionBackend, size: int) -> Graph:
        work = self._work(buffers, attention, size)
        self._device.warm_up(work)  # another size may use other kernels, and these must not be loaded during a capture
        return self._device.capture(work)

    def _work(self, buffers: DecodeBuffers, attention: AttentionBackend, size: int) -> Callable[[], torch.Tensor]:
        if not isinstance(attention, DecodeGraphAttention):
            raise CaptureRefusedError(f"{type(attention).__name__} has no plan that can be captured")
        view = buffers.view(size)
        context = StepContext(positions=view.positions, plans=attention.plan_decode(view.tables))
        return partial(self._forward, view.input_ids, context)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._buffers = None
        self._drop()
        if self._settings.is_required:
            raise ConfigError(
                f"gpu.cuda_graphs is true, but decode steps cannot be captured: {error}; auto continues without graphs"
            ) from error
        logger.warning("decode steps run without CUDA graphs, which makes them slower: %s", error)

    def _drop(self) -> None:
        self._graphs.clear()
        self._device.release()
