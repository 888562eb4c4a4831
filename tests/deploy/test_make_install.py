"""The output of `make serve` while it installs, with a Python that installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = r"""#!/bin/sh
case "$*" in
  "-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/baton" ;;
  *"--progress-bar off"*)
    echo "Collecting torch"
    echo "  Downloading torch-2.9.whl (180.0 MB)"
    echo "Installing collected packages: torch, ray"
    exit "${PIP_ENDS_WITH:-0}" ;;
esac
"""


def make_serve(folder: Path, *, pip_ends_with: int = 0) -> subprocess.CompletedProcess[str]:
    """`make serve` in a folder of its own."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder)
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["make", "serve", f"PYTHON={python}"],
        cwd=folder,
        env={**environment, "PIP_ENDS_WITH": str(pip_ends_with)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_first_time_says_what_takes_long_and_the_second_one_installs_nothing(tmp_path: Path) -> None:
    first = make_serve(tmp_path)

    assert first.returncode == 0, first.stderr
    assert "Installing Baton and what it needs" in first.stderr
    assert "Downloading torch-2.9.whl (180.0 MB)" in first.stderr
    assert "Installing collected packages" in first.stderr
    assert "Collecting" not in first.stderr
    assert make_serve(tmp_path).stderr == ""


@pytest.mark.parametrize("code", [1, 2])
def test_failed_installation_fails_and_is_tried_again(tmp_path: Path, code: int) -> None:
    assert make_serve(tmp_path, pip_ends_with=code).returncode != 0
    assert "Installing" in (again := make_serve(tmp_path)).stderr
    assert again.returncode == 0
