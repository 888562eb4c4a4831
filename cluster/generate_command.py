"""`baton generate`: one engine in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import DeviceName, DTypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The command's options."""

    model: Path | None
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    device: DeviceName
    dtype: DTypeName
