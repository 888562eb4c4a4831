"""Steps that compute prompts on the CPU: between one layer's attention and the next one's a single recorded call."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionPlan, PlanInTwo
from engine.kernels.call import CallList, recording
from engine.kernels.products.tile_product import MAX_ROWS as SMALL_PRODUCT
from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations
from engine.model.step_context import Forward, StepContext
from engine.runner.recording import StepMemory, Watch
from engine.runner.step_inputs import StepInputs

logger = logging.getLogger(f"baton.{__name__}")

MIN_TOKENS: Final = SMALL_PRODUCT
"""From here on the inputs of products are laid out alike for any number of rows (``rows_for_product``)."""

MAX_TOKENS: Final = 256
"""Longer steps are not recorded: what lies between their kernels hardly counts, and their results take much memory."""


class RecordedPrompts:
    """The recorded calls of one model's steps of ``MIN_TOKENS`` to ``MAX_TOKENS`` tokens. Used from one thread.

    All kernels between two layers' attention only depend on the number of tokens. The first step shows how much memory
    they need, the second one records their calls, and later ones repeat these with their own number of tokens.
    Attention depends on the requests: it is computed as usual, into the memory that the next calls read. Once torch is
    seen to compute anything else, nothing is repeated.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._inputs: _FixedInputs | None = None
        self._memory: StepMemory | None = StepMemory(MAX_TOKENS, sizes=None)  # None: nothing is recorded any more
        self._recorded: _RecordedPrompt | None = None

    @property
    def is_recorded(self) -> bool:
        """True once there are calls to repeat."""
        return self._recorded is not None

    def run(
        self, inputs: StepInputs, attention: AttentionBackend, between_layers: Callable[[], None] | None
    ) -> torch.Tensor | None:
        """See ``RecordedSteps.run``."""
        num_tokens = len(inputs.input_ids)
        if self._memory is None or not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
            return None
        if self._inputs is None:
            self._inputs = _FixedInputs(num_groups=len(inputs.attention.slots))
        fixed = self._inputs
        fixed.fill(inputs)
        batch = dataclasses.replace(inputs.attention, slots=fixed.slots[:, :num_tokens], is_reused=False)
        plans = attention.plan(batch)
        if self._recorded is not None:
            return self._recorded.run(num_tokens, cast(Sequence[PlanInTwo], plans), between_layers)
        context = StepContext(fixed.positions[:num_tokens], plans, between_layers)
        return self._record(fixed.input_ids[:num_tokens], context, self._memory)

    def _record(self, input_ids: torch.Tensor, context: StepContext, memory: StepMemory) -> torch.Tensor:
        num_tokens, parts, attended = len(input_ids), [CallList()], list[_Attended]()
        memory.rewind(num_tokens)
        with recording() as into, Watch(memory) as watch:
            into(parts[0])

            def next_layer() -> None:
                if context.between_layers is not None:
                    into(None)
                    with watch.paused():
                        context.between_layers()
                    into(parts[-1])

            def attend(
                plan: AttentionPlan, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations
            ) -> torch.Tensor:
                if not isinstance(plan, PlanInTwo):
                    watch.others.add(type(plan).__name__)
                    return plan.attend_heads(layer, heads, rotations)
                query = plan.place(layer, heads, rotations)
                attended.append(_Attended(layer, heads, query, torch.empty_like(query)))
                into(None)
                with watch.paused():
                    plan.attend_placed(*attended[-1])
                parts.append(CallList())
                into(parts[-1])
                memory.next_part()
                return attended[-1].output.flatten(1)

            plans = [_Divided(plan, attend) for plan in context.plans]
            hidden = self._forward(input_ids, StepContext(context.positions, plans, next_layer))
        can_repeat = not watch.others and bool(attended) and all(part.can_scale(num_tokens) for part in parts)
        if not can_repeat:
            logger.debug("prompts are not recorded; torch computes %s", sorted(watch.others))
            self._memory = None
        elif memory.rehearses:
            self._memory = StepMemory(MAX_TOKENS, sizes=memory.peaks)
        else:
            self._recorded = _RecordedPrompt(parts, attended, hidden, memory.lent)
        return hidden


class _FixedInputs:
    """A step's tokens, at addresses that stay the same."""

    def __init__(self, *, num_groups: int) -> None:
        self.input_ids, self.positions = torch.zeros(2, MAX_TOKENS, dtype=torch.int64)
        self.slots = np.zeros((num_groups, MAX_TOKENS), dtype=np.int64)

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's tokens here."""
        num_tokens = len(inputs.input_ids)
        self.input_ids.numpy()[:num_tokens] = inputs.input_ids
        self.positions.numpy()[:num_tokens] = inputs.positions
        self.slots[:, :num_tokens] = inputs.attention.slots


class _Attended(NamedTuple):
    """What attention of a layer reads and writes, each [num_tokens, ...]."""

    layer: AttentionLayer
    heads: torch.Tensor
    query: torch.Tensor
    output: torch.Tensor


Attend = Callable[[AttentionPlan, AttentionLayer, torch.Tensor, Rotations], torch.Tensor]


class _Divided:
    """A plan whose ``attend_heads`` is recorded in two parts. Implements ``AttentionPlan``."""

    def __init__(self, plan: AttentionPlan, attend: Attend) -> None:
        self._plan, self._attend = plan, attend
        self.attend = plan.attend

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """See ``AttentionPlan``."""
        return self._attend(self._plan, layer, heads, rotations)


class _RecordedPrompt:
    """``parts``: the calls before, between and behind attention of the layers. ``memory`` holds their results."""

    def __init__(
        self, parts: Sequence[CallList], attended: Sequence[_Attended], hidden: torch.Tensor, memory: list[torch.Tensor]
    ) -> None:
        self._first, self._hidden, self._memory = parts[0], hidden, memory
        # Every other layer has its tensors in the same memory.
        distinct: dict[tuple[object, ...], _Attended] = {}
        places = [tuple((tensor.data_ptr(), tensor.shape) for tensor in each[1:]) for each in attended]
        for place, each in zip(places, attended, strict=True):
            distinct.setdefault(place, each)
        self._distinct = list(distinct.values())
        numbers = {place: number for number, place in enumerate(distinct)}
        self._layers = [
            (each.layer, numbers[place], following)
            for each, place, following in zip(attended, places, parts[1:], strict=True)
        ]

    def run(
        self, num_tokens: int, plans: Sequence[PlanInTwo], between_layers: Callable[[], None] | None
    ) -> torch.Tensor:
        """A step of so many tokens."""
        rows = [[_rows(tensor, num_tokens) for tensor in each[1:]] for each in self._distinct]
        self._first.run(num_tokens)
        for layer, number, following in self._layers:
            if between_layers is not None:
                between_layers()
            plans[layer.group].attend_placed(layer, *rows[number])
            following.run(num_tokens)
        return _rows(self._hidden, num_tokens)


def _rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The first rows of the memory that a tensor was taken from."""
    return tensor.as_strided((num_rows, *tensor.shape[1:]), tensor.stride())
