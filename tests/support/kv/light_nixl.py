"""Imports NIXL without torch, for child processes that do not need it: importing torch would take most of their
time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def import_nixl_without_torch() -> None:
    """Load NIXL, which only asks torch for the version of CUDA that it was built with.

    That is in ``torch/version.py``, which can be loaded alone; whoever needs torch later gets all of it.
    """
    if "torch" in sys.modules or "nixl" in sys.modules:
        return
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    name = "torch.version"
    spec = importlib.util.spec_from_file_location(name, Path(torch.origin).with_name("version.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        import kv_transfer.nixl.agent  # noqa: F401  # the importer of NIXL
    finally:
        del sys.modules[name]
