"""A change of a configuration, which is tried before it is suggested to the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cluster.config.config import BatonConfig

Key = tuple[str, ...]
"""A key with the names of its sections: ``("decode", "cache", "num_blocks")``."""

NUM_ONE_BY_ONE = 8
"""How many changes of a group are tried one by one. Each trial makes a plan, and a large cluster's takes a second."""


@dataclass(frozen=True, slots=True)
class Change:
    """Keys and their new values."""

    values: tuple[tuple[Key, Any], ...]

    @classmethod
    def of(cls, *values: tuple[Key, Any]) -> Change:
        """A change of these keys."""
        return cls(values)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that it changes."""
        return tuple(key for key, _ in self.values)

    def applied(self, config: BatonConfig) -> BatonConfig | None:
        """The configuration with these values; None if they are not valid."""
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
        """The change as an instruction with full keys: ``lower decode_replicas to 1 and ...``."""
        return " and ".join(
            f"{_verb(_value_of(config, key), value)} {'.'.join(key)} to {json.dumps(value)}"
            for key, value in self.values
        )


def first_that_helps(
    changes: Iterable[Change], config: BatonConfig, helps: Callable[[BatonConfig], bool]
) -> Change | None:
    """The first change with which the configuration works as it should; None if none helps.

    ``changes`` must be ordered from small to large. The first few are tried one by one. If they do not help but the
    last one does, the first that helps is found by bisection.
    """

    def does_help(change: Change) -> bool:
        changed = change.applied(config)
        return changed is not None and helps(changed)

    every = list(changes)
    found = next((change for change in every[:NUM_ONE_BY_ONE] if does_help(change)), None)
    if found is not None or len(every) <= NUM_ONE_BY_ONE or not does_help(every[-1]):
        return found
    without, helping = NUM_ONE_BY_ONE - 1, len(every) - 1
    while helping - without > 1:
        middle = (without + helping) // 2
        if does_help(every[middle]):
            helping = middle
        else:
            without = middle
    return every[helping]


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
