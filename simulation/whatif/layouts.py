"""Layouts by their names for users, and the layouts that a search tries for a number of workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from engine.contract.promise import NO_PROMISE, Promise
from simulation.layout import SMALL_CHUNK, Layout, LayoutError, apart, elastic, unified
from simulation.machine import Machine
from simulation.search import FIRST_SHARES

NAME = re.compile(
    r"(?P<kind>apart|unified|elastic):(?P<first>\d+)(?:\+(?P<second>\d+)(?:\+(?P<mixed>\d+))?)?(?:/(?P<chunk>\d+))?"
)
PARTS = ("first", "second", "mixed", "chunk")
MAX_WORKERS = 1024
ALL_RATIOS = 8
"""Up to this many workers, a search tries every ratio of prefill to decode workers; with more, only some."""

MIXED_SHARE = 0.25
"""The share of mixed workers beside the two pools, where a search tries such layouts."""

FORMS = (
    "layouts are written as apart:2+6, apart:2+5+1 (with 1 mixed worker), unified:8, unified:8/128 (chunks of 128 "
    "tokens) or elastic:8"
)


def parse_layouts(text: str, machine: Machine, promise: Promise) -> list[Layout]:
    """The layouts of a list such as ``apart:2+6,unified:8,elastic:8``, each once.

    Raises:
        LayoutError: A name is not a layout; the message says which.
    """
    found = [parse_layout(name.strip(), machine, promise) for name in text.split(",") if name.strip()]
    if not found:
        raise LayoutError(f"no layout is named in {text!r}; {FORMS}")
    return list({layout.name: layout for layout in found}.values())


def parse_layout(name: str, machine: Machine, promise: Promise) -> Layout:
    """One layout by its name, which becomes the layout's name. Elastic layouts use ``promise``.

    Raises:
        LayoutError: The name is not a layout.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise LayoutError(f"{name!r} is not a layout; {FORMS}")
    first, second, mixed, chunk = (int(text) if (text := match[part]) else None for part in PARTS)
    kind = match["kind"]
    if (kind == "apart") is (second is None):
        counts = (
            "two or three numbers of workers, as in apart:2+6"
            if kind == "apart"
            else f"one number of workers, as in {kind}:8"
        )
        raise LayoutError(f"{name}: give {counts}")
    if chunk is not None and (kind != "unified" or chunk < 1):
        raise LayoutError(f"{name}: chunks need unified workers and at least 1 token, as in unified:8/128")
    assert first is not None
    if (num_workers := first + (second or 0) + (mixed or 0)) > MAX_WORKERS:
        raise LayoutError(f"{name} has {num_workers} workers, at most {MAX_WORKERS} can be simulated")
    _check_least(name, kind, first, second)
    if second is not None:
        return replace(apart(first, second, machine, num_mixed=mixed or 0), name=name)
    return replace(_of_one_kind(kind, first, chunk, machine, promise), name=name)


def _check_least(name: str, kind: str, first: int, second: int | None) -> None:
    if kind == "unified" and first < 1:
        raise LayoutError(f"{name} has {first} workers: a layout needs at least one worker, as in unified:1")
    if kind == "elastic" and first < 2:
        raise LayoutError(
            f"{name} has {first} {'worker' if first == 1 else 'workers'}: elastic ones lean to prompts or to tokens, "
            "at least one to each: name elastic:2 or more, or unified:1"
        )
    if second is not None and min(first, second) < 1:
        raise LayoutError(
            f"{name} has {first} prefill and {second} decode workers: a layout needs at least one worker of each kind, "
            "as apart:1+1 has"
        )


def _of_one_kind(kind: str, num_workers: int, chunk: int | None, machine: Machine, promise: Promise) -> Layout:
    if kind == "unified":
        return unified(num_workers, machine) if chunk is None else unified(num_workers, machine, chunk=chunk)
    if promise == NO_PROMISE:
        raise LayoutError(
            f"elastic:{num_workers} needs a promise: give --ttft-ms, --itl-ms or both, or leave this layout out"
        )
    return elastic(num_workers, machine, promise)


def layouts_of_size(num_workers: int, machine: Machine, promise: Promise) -> Sequence[Layout]:
    """The layouts that a search tries: one pool with large or small chunks, elastic roles, and ratios of two pools, all
    of the workers or with some mixed ones beside."""
    names = [f"unified:{num_workers}", f"unified:{num_workers}/{SMALL_CHUNK}"]
    if num_workers > 1:
        names.append(f"elastic:{num_workers}")
        names += [f"apart:{number}+{num_workers - number}" for number in _ratios(num_workers)]
    if num_workers > 2:
        num_mixed = max(1, round(MIXED_SHARE * num_workers))
        num_bound = num_workers - num_mixed
        names += [f"apart:{number}+{num_bound - number}+{num_mixed}" for number in _ratios(num_bound)]
    return [parse_layout(name, machine, promise) for name in names]


def _ratios(num_workers: int) -> Sequence[int]:
    """The numbers of prefill workers that are tried of so many for prefill and decode."""
    if num_workers <= ALL_RATIOS:
        return range(1, num_workers)
    return sorted({max(1, round(share * num_workers)) for share in FIRST_SHARES})
