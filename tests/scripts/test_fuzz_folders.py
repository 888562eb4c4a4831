"""What a fuzzing leaves in the folder for temporary files, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzz import own_folder

CODE = """
from benchmarks.process_group import end_on_sigterm
from scripts.fuzz import own_folder
end_on_sigterm()
with own_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def start() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folder_goes_when_the_fuzzing_is_asked_to_end(temporary: Path) -> None:
    process, folder = start()
    with process:
        assert folder.is_dir()
        process.terminate()

    assert list(temporary.iterdir()) == []


def test_folder_of_one_that_was_killed_goes_with_the_next_and_that_of_a_running_one_stays(temporary: Path) -> None:
    killed, left = start()
    with killed:
        killed.kill()
    running, used = start()
    with running:
        assert not left.exists()
        with own_folder() as own:
            assert sorted(temporary.iterdir()) == sorted([used, own])
        running.terminate()

    assert list(temporary.iterdir()) == []
