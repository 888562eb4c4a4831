"""What a starting process imports, and how."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from cluster.serve.process_start import loading


def test_command_that_starts_a_cluster_loads_neither_torch_nor_numba() -> None:
    script = "import sys, cluster.commands.serve, cluster.commands.deploy; print({'torch', 'numba'} & {*sys.modules})"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)

    assert result.stdout.strip() == "set()", "a start waits for them; only workers need them"


def test_collector_rests_while_modules_load_and_leaves_them_alone_afterwards() -> None:
    frozen = gc.get_freeze_count()
    try:
        with loading():
            assert not gc.isenabled()

        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_collector_works_again_when_a_module_fails_to_load() -> None:
    try:
        with pytest.raises(ModuleNotFoundError), loading():
            raise ModuleNotFoundError("nixl")

        assert gc.isenabled()
    finally:
        gc.unfreeze()
