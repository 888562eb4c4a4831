"""Decode steps on the CPU as recorded kernel calls: a layer is one call, without Python between its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import torch

from engine.attention.backend import AttentionBackend
from engine.kernels.call import CALL_LOOP, CallList, recording
from engine.kernels.compiled_once import want
from engine.model.step_context import Forward, StepContext
from engine.runner.recorded_prompts import RecordedPrompts
from engine.runner.recording import StepMemory, Watch
from engine.runner.step_inputs import StepInputs

logger = logging.getLogger(f"baton.{__name__}")

MAX_ROWS: Final = 64
"""Decode steps of more rows are taken for prompts: what lies between their kernels counts less, and there may be many
such numbers.
"""


class RecordedSteps:
    """The recorded steps of one model: of decode steps one for each number of rows. Used from one thread.

    The very first decode step is only watched. From then on, the first one with a number of rows records its kernel
    calls while it computes, and later ones repeat them. All that changes from step to step lies in arrays at fixed
    addresses (``DecodeLayout``). Once torch is seen to compute anything in a step, no further steps are recorded. Other
    steps repeat all but their attention (``RecordedPrompts``).
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._memory: StepMemory | None = StepMemory(sizes=None)  # None: nothing is recorded any more
        self._prompts = RecordedPrompts(forward)
        self._steps: dict[int, _RecordedStep] = {}
        want(CALL_LOOP)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows whose decode steps are repeated, ascending."""
        return tuple(sorted(self._steps))

    @property
    def repeats_prompts(self) -> bool:
        """True once all but attention of other steps is repeated."""
        return self._prompts.is_recorded

    def run(
        self, inputs: StepInputs, attention: AttentionBackend, between_layers: Callable[[], None] | None
    ) -> torch.Tensor | None:
        """Compute a step whose tokens are all known: [num_tokens, hidden_size], as ``forward`` returns, valid until the
        next step; None if it has to be computed layer by layer.
        """
        num_rows = len(inputs.input_ids)
        if inputs.on_host is None or num_rows > MAX_ROWS:
            return self._prompts.run(inputs, attention, between_layers)
        step = self._steps.get(num_rows)
        if step is not None:
            return step.run(between_layers)
        if self._memory is None:
            return None
        assert inputs.attention.is_reused
        input_ids, positions = inputs.on_host
        plans = attention.plan(inputs.attention)
        return self._record(input_ids, StepContext(positions, plans, between_layers), self._memory)

    def _record(self, input_ids: torch.Tensor, context: StepContext, memory: StepMemory) -> torch.Tensor:
        parts = [CallList()]
        memory.rewind(len(input_ids))
        with recording() as into, Watch(memory) as watch:
            into(parts[0])

            def next_layer() -> None:
                if context.between_layers is not None:
                    into(None)
                    with watch.paused():
                        context.between_layers()
                parts.append(CallList())
                into(parts[-1])
                memory.next_part()

            hidden = self._forward(input_ids, context._replace(between_layers=next_layer))
        if watch.others:
            logger.debug("decode steps are not recorded: torch computes %s", sorted(watch.others))
            self._memory = None
        elif memory.rehearses:
            self._memory = StepMemory(sizes=memory.peaks)
        else:
            self._steps[len(input_ids)] = _RecordedStep(parts, hidden, memory.lent)
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
