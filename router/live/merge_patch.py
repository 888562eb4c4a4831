"""The difference between two states, as a JSON merge patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The patch from ``before`` to ``after``: what differs, and null for what was removed. Neither may hold null."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if old == value:
            continue
        both = isinstance(old, dict) and isinstance(value, dict)
        patch[name] = merge_patch(cast(dict[str, Any], old), value) if both else value
    return patch


def apply_patch(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a patch to an object, and return a new one."""
    changed = dict(target)
    for name, value in patch.items():
        if value is None:
            changed.pop(name, None)
        elif isinstance(value, dict):
            old = changed.get(name)
            changed[name] = apply_patch(old if isinstance(old, dict) else {}, value)
        else:
            changed[name] = value
    return changed
