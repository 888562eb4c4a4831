"""What makes two deployments the same: their settings, and the code that they run."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

PACKAGES = ("cluster", "prefill", "decode", "kv_transfer", "router", "engine")


def deployment_version(settings: object) -> str:
    """A digest of settings (dataclasses all the way down) and of our code; equal digests need no restart."""
    return hashlib.sha256(f"{code_digest()} {settings!r}".encode()).hexdigest()[:16]


@functools.cache
def code_digest() -> str:
    """A digest of every module of ours, so that an upgrade replaces what runs the old code."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.relative_to(folder).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
