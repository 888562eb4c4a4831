"""Pickles that processes of two versions can read from each other, as they must during a rolling update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
State: TypeAlias = Sequence[object] | Mapping[str, object]


def across_versions(cls: type[T]) -> type[T]:
    """Have a dataclass with slots read by :func:`take_state`: the outermost decorator, since that of dataclasses puts a
    ``__setstate__`` of its own in the place of any (Python 3.11.2)."""
    cls.__setstate__ = take_state  # type: ignore[attr-defined]
    return cls


def named_across_versions(cls: type[T]) -> type[T]:
    """``across_versions`` for a dataclass with fields of base classes: they are pickled with their names, because each
    new base class moves the fields behind its own."""
    cls.__getstate__ = _named_state  # type: ignore[method-assign]
    return across_versions(cls)


def _named_state(self: Any) -> Mapping[str, object]:
    """``__getstate__`` of such a dataclass."""
    return {item.name: getattr(self, item.name) for item in fields(self)}


def take_state(self: Any, state: State) -> None:
    """``__setstate__`` of a dataclass with slots: fields that the other version does not have get their defaults, and
    those that this one does not have are left out.

    A dataclass that is read by this adds fields at its end, with a default, and never drops one, moves one, or gives
    one another meaning: frozen ones are pickled by position, unless they are ``named_across_versions``.
    """
    told = _by_name(fields(self), state)
    for item in fields(self):
        object.__setattr__(self, item.name, told[item.name] if item.name in told else _default(self, item))


def _by_name(items: Sequence[Field[Any]], state: State) -> Mapping[str, object]:
    """What was pickled: values in the order of the fields, from a frozen dataclass; names and values, from one that is
    ``named_across_versions``; else the same behind a None, which stands for the attributes outside of the slots."""
    if isinstance(state, tuple):
        return dict(state[1])
    if isinstance(state, Mapping):
        return state
    return dict(zip((item.name for item in items), state, strict=False))


def _default(owner: object, item: Field[Any]) -> object:
    if item.default is not MISSING:
        return item.default
    if item.default_factory is not MISSING:
        return item.default_factory()
    raise TypeError(
        f"{type(owner).__name__} came without {item.name}, which has no default: it is from a version that is too old"
    )
