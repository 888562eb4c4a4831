"""`baton models`: which architectures are supported, and on what they run."""

from __future__ import annotations

from typing import TextIO

from engine.model.model_config import SUPPORTED_DTYPES
from engine.model.registry import architectures


def print_models(output: TextIO) -> None:
    """Print one line an architecture: the name in config.json, where it runs, and what it is."""
    facts = architectures()
    name_width = max(len(fact.name) for fact in facts)
    for fact in facts:
        devices = "cpu, cuda" if fact.cpu_only is None else "cpu"
        print(f"{fact.name:<{name_width}}  {devices:<9}  {fact.family}: {fact.description}", file=output)
    dtypes = ", ".join(SUPPORTED_DTYPES)
    print(f"All run natively, from safetensors in {dtypes}; see docs/models.md.", file=output)
    print("Other decoders use the code of transformers, if that is installed (model_impl).", file=output)
