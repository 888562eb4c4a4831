"""One watched pass of a loaded model: the inputs and results of its modules, and what reaches attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, PreTrainedModel

from engine.model.transformers_backend.parts.agreement import NUM_ROWS

IMPLEMENTATION: Final = "baton_watch"
"""Name in transformers of the attention that records its inputs. No mask function is registered under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a module; ``module`` is its name in the model."""

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def num_arguments(self) -> int:
        """Number of positional and keyword arguments."""
        return len(self.args) + len(self.kwargs)

    @property
    def given(self) -> torch.Tensor | None:
        """The hidden states, [1, num_tokens, size]: the first argument, or the keyword that all models use for them."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, torch.Tensor) else None

    @property
    def result(self) -> torch.Tensor | None:
        """The result, or the first element of a tuple."""
        first = self.output[0] if isinstance(self.output, tuple) else self.output
        return first if isinstance(first, torch.Tensor) else None

    def with_given(self, other: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with other hidden states."""
        given = self.given
        args, kwargs = pytree.tree_map(lambda value: other if value is given else value, (self.args, self.kwargs))
        return args, kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """positions: [NUM_ROWS] of the pass's tokens: the first, the last and some between. calls: in the order in which
    they ended. hidden: what the model returned, without its head.
    """

    positions: torch.Tensor
    calls: Sequence[Call]
    hidden: torch.Tensor

    def call(self, module: str) -> Call | None:
        """The call of a module that was called exactly once, else None."""
        calls = [call for call in self.calls if call.module == module]
        return calls[0] if len(calls) == 1 else None


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's arguments, each [num_tokens, number of heads, head_dim], and its result, shaped as the queries."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attended: torch.Tensor


_heads: list[Heads] = []
"""What attention was given last; global, because attention functions are looked up by name."""


def _keep(
    module: nn.Module,  # noqa: ARG001  (transformers' signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    by_token = [part[0].transpose(0, 1) for part in (query, key, value)]
    generator = torch.Generator().manual_seed(query.shape[1])
    shape = by_token[0].shape
    attended = torch.randn(shape, generator=generator).to(device=query.device, dtype=query.dtype)
    query, key, value = (part.clone() for part in by_token)
    _heads[:] = [Heads(query, key, value, attended)]
    return attended.clone().unsqueeze(0), None  # the model's code may write to it


AttentionInterface.register(IMPLEMENTATION, _keep)


@contextmanager
def watching_attention(model: PreTrainedModel) -> Iterator[list[Heads]]:
    """Within the block, the model's attention only records what it was given last, in the yielded list."""
    before = model.config._attn_implementation
    model.config._attn_implementation = IMPLEMENTATION
    try:
        yield _heads
    finally:
        model.config._attn_implementation = before
        _heads.clear()


@contextmanager
def hooked(modules: Mapping[str, nn.Module], calls: list[Call], *, copies: bool = False) -> Iterator[None]:
    """Within the block, every call of the modules is appended to ``calls``. With ``copies``, arguments and results are
    copied, so that later writes do not change them.
    """

    def keep(name: str) -> Any:
        def hook(_: nn.Module, *seen: Any) -> None:
            args, kwargs, output = pytree.tree_map(_copied, seen) if copies else seen
            calls.append(Call(module=name, args=args, kwargs=kwargs, output=output))

        return hook

    handles = [module.register_forward_hook(keep(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def watch(model: PreTrainedModel, *, max_positions: int) -> Watched:
    """Run a model's layers on a few tokens at positions from all over its context."""
    device = model.device
    positions = torch.linspace(0, max_positions - 1, NUM_ROWS, dtype=torch.float64).long().to(device)
    ids = torch.arange(NUM_ROWS, device=device).remainder(model.config.vocab_size)
    calls: list[Call] = []
    modules = {name: module for name, module in model.named_modules() if name}
    with watching_attention(model), hooked(modules, calls):
        output = model.base_model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    return Watched(positions=positions, calls=calls, hidden=output.last_hidden_state)
