"""The JSON files of a checkpoint. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.contract.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file, which must be an object.

    Raises:
        CheckpointError: Unreadable, or something else than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not contain a JSON object")
    return content


def read_json_object_if_there(file: Path) -> dict[str, Any]:
    """Like ``read_json_object``, but an empty dict where there is no such file."""
    return read_json_object(file) if file.is_file() else {}
