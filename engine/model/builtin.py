"""The default model, for when none is named."""

from __future__ import annotations

from pathlib import Path

BUILTIN_MODEL_DIR = Path(__file__).parents[1] / "builtin_model"


def builtin_model_dir() -> Path:
    """The directory of the small model that comes with Baton."""
    return BUILTIN_MODEL_DIR
