"""A change of a configuration, tried before anybody is told to make it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cluster.config import BatonConfig

Key = tuple[str, ...]
"""A key with its sections: ``("decode", "cache", "num_blocks")``."""

MAX_TRIALS = 100
"""Of one group. What would take more is a configuration that nobody meant."""


@dataclass(frozen=True, slots=True)
class Change:
    """Keys, and the values that they should have."""

    values: tuple[tuple[Key, Any], ...]

    @classmethod
    def of(cls, *values: tuple[Key, Any]) -> Change:
        """A change of these keys."""
        return cls(values)

    @property
    def keys(self) -> tuple[Key, ...]:
        """What it changes."""
        return tuple(key for key, _ in self.values)

    def applied(self, config: BatonConfig) -> BatonConfig | None:
        """The configuration with these values; None where there can be no such configuration."""
        content = config.model_dump(exclude_unset=True)
        for key, value in self.values:
            section = content
            for part in key[:-1]:
                section = section.setdefault(part, {})
            section[key[-1]] = value
        try:
            return BatonConfig.model_validate(content)
        except ValidationError:
            return None

    def describe(self, config: BatonConfig) -> str:
        """What to do, with every key as it is written: ``lower decode_replicas to 1 and ...``."""
        return " and ".join(
            f"{_verb(_value_of(config, key), value)} {'.'.join(key)} to {json.dumps(value)}"
            for key, value in self.values
        )


def first_that_helps(
    changes: Iterable[Change], config: BatonConfig, helps: Callable[[BatonConfig], bool]
) -> Change | None:
    """The first change with which the configuration does what it should; None where none of them does."""
    for _, change in zip(range(MAX_TRIALS), changes, strict=False):
        changed = change.applied(config)
        if changed is not None and helps(changed):
            return change
    return None


def _value_of(config: BatonConfig, key: Key) -> Any:
    value: Any = config
    for part in key:
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def _verb(old: Any, new: Any) -> str:
    are_amounts = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    if not are_amounts:
        return "set"
    return "lower" if new < old else "raise"
