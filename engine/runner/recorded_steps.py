"""Decode steps on the CPU as recorded kernel calls: a layer is one call, without Python between its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.backend import AttentionBackend
from engine.kernels.call import CALL_LOOP, CallList, recording
from engine.kernels.compiled_once import want
from engine.model.step_context import StepContext
from engine.runner.step_inputs import StepInputs

logger = logging.getLogger(f"baton.{__name__}")

MAX_ROWS: Final = 64
"""Larger steps are not recorded: their kernels take so long that what lies between them does not count."""

MIN_REGION_BYTES: Final = 1 << 18
LINE_BYTES: Final = 64

Forward = Callable[[torch.Tensor, StepContext], torch.Tensor]
"""Maps token ids to hidden states: ``Decoder.forward``."""

_ALLOCATIONS: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


class RecordedSteps:
    """The recorded decode steps of one model, one for each number of rows. Used from one thread.

    The first decode step with a number of rows records its kernel calls while it computes; later ones repeat them. All
    that changes from step to step lies in arrays at fixed addresses (``DecodeLayout``). Once torch is seen to compute
    anything in a step, no further steps are recorded.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._arena: _Arena | None = _Arena()  # None: nothing is recorded any more
        self._steps: dict[int, _RecordedStep] = {}
        want(CALL_LOOP)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows whose steps are repeated, ascending."""
        return tuple(sorted(self._steps))

    def run(
        self, inputs: StepInputs, attention: AttentionBackend, between_layers: Callable[[], None] | None
    ) -> torch.Tensor | None:
        """Compute a step whose tokens are all known: [num_tokens, hidden_size], as ``forward`` returns, valid until the
        next step; None if it has to be computed layer by layer.
        """
        if inputs.on_host is None:
            return None
        step = self._steps.get(len(inputs.input_ids))
        if step is not None:
            return step.run(between_layers)
        if self._arena is None or len(inputs.input_ids) > MAX_ROWS:
            return None
        assert inputs.attention.is_reused
        input_ids, positions = inputs.on_host
        plans = attention.plan(inputs.attention)
        return self._record(input_ids, StepContext(positions, plans, between_layers), self._arena)

    def _record(self, input_ids: torch.Tensor, context: StepContext, arena: _Arena) -> torch.Tensor:
        parts = [CallList()]
        arena.rewind()
        with recording() as into, _Watch(arena) as watch:
            into(parts[0])

            def next_layer() -> None:
                if context.between_layers is not None:
                    watch.is_on = False
                    into(None)
                    context.between_layers()
                    watch.is_on = True
                parts.append(CallList())
                into(parts[-1])
                arena.next_layer()

            hidden = self._forward(input_ids, context._replace(between_layers=next_layer))
        if watch.others:
            logger.debug("decode steps are not recorded: torch computes %s", sorted(watch.others))
            self._arena = None
        else:
            self._steps[len(input_ids)] = _RecordedStep(parts, hidden, arena.lent)
        return hidden


class _RecordedStep:
    """``parts``: the calls before the first layer, then those of each layer. ``memory`` holds their results."""

    def __init__(self, parts: list[CallList], hidden: torch.Tensor, memory: list[torch.Tensor]) -> None:
        self._parts, self._hidden, self._memory = parts, hidden, memory

    def run(self, between_layers: Callable[[], None] | None) -> torch.Tensor:
        first, *layers = self._parts
        first.run()
        for layer in layers:
            if between_layers is not None:
                between_layers()
            layer.run()
        return self._hidden


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not say what subclassing takes
    """Gives tensors memory from an arena, and notes what torch computes: then they get memory of their own, since
    nothing is known of how long such a model needs them.

    others: names of all operators but those that allocate or make views. is_on: can be turned off for a while.
    """

    def __init__(self, arena: _Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()
        self.is_on = True
        self._arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_on:
            return result
        if func not in _ALLOCATIONS and not _is_view(func):
            self.others.add(str(func))
        return self._arena.take(result) if func in _ALLOCATIONS and not self.others else result


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    is_view = bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)
    return is_view and func is not torch.ops.aten.lift_fresh.default  # which makes a tensor of Python's numbers


class _Arena:
    """Memory for what steps compute, the same for each: only one runs at a time, and none needs another's results.

    What is taken before the first layer lasts for the whole step. What a layer takes lasts until the layer after the
    next one begins: the same few lines of the caches serve all layers.
    """

    def __init__(self) -> None:
        self._regions = [torch.empty(MIN_REGION_BYTES, dtype=torch.uint8) for _ in range(3)]
        self._ends = [0, 0, 0]
        self._num_layers = 0
        self.lent: list[torch.Tensor] = []

    def rewind(self) -> None:
        """Begin a step. ``lent`` are the pieces of memory that it takes tensors from."""
        self._ends, self._num_layers, self.lent = [0, 0, 0], 0, list(self._regions)

    def next_layer(self) -> None:
        """Begin a layer."""
        self._num_layers += 1
        self._ends[self._region] = 0

    @property
    def _region(self) -> int:
        return 1 + self._num_layers % 2 if self._num_layers else 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, dtype and strides."""
        index, num_bytes = self._region, like.untyped_storage().nbytes()
        if self._ends[index] + num_bytes > len(self._regions[index]):
            size = 2 * max(len(self._regions[index]), num_bytes)
            self._regions[index], self._ends[index] = torch.empty(size, dtype=torch.uint8), 0
            self.lent.append(self._regions[index])
        start = self._ends[index]
        self._ends[index] = start + -(-num_bytes // LINE_BYTES) * LINE_BYTES
        memory = self._regions[index][start : start + num_bytes].view(like.dtype)
        return memory.as_strided(like.shape, like.stride())
