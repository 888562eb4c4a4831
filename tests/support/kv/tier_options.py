"""What tiers are told in tests: how large they are, and where they may keep files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from kv_transfer.registry import TIERS


def tier_options(sources: Iterable[str], *, num_bytes: int, folder: Path | None) -> dict[str, Any]:
    """The options of those sources that are tiers. One with an option ``<name>_path`` gets the folder, which it needs
    then.
    """
    given: dict[str, Any] = {}
    for tier in (TIERS[name] for name in sources if name in TIERS):
        given[tier.size_key] = num_bytes
        if (path := f"{tier.name}_path") in {item.name for item in fields(tier.options)}:
            assert folder is not None
            given[path] = str(folder)
    return given
