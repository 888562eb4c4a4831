"""The servers of peers end with the benchmark, even if they ignore signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.vllm_server import server_command
from benchmarks.process_group import end_group, served_group

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
child.wait()
"""


def test_whole_group_ends_though_its_leader_ignores_the_wish() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "ready\n"

        end_group(process, timeout_s=0.1)

        assert output.read() == ""  # ends only when the child, which holds the other end too, is gone
    assert process.returncode is not None


def test_benchmark_that_is_asked_to_end_ends_what_it_runs() -> None:
    code = """
from benchmarks.process_group import end_on_sigterm
end_on_sigterm()
try:
    print("ready", flush=True)
    input()
finally:
    print("ended", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()

        assert process.stdout.read() == b"ended\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    served = served_group(
        command,
        ready_url="http://127.0.0.1:9/health",
        environment=dict(os.environ),
        directory=tmp_path,
        start_timeout_s=60.0,
    )

    with pytest.raises(RuntimeError, match="exit code 3"), served:
        pass

    assert "no such model" in capfd.readouterr().err


def test_peer_is_asked_for_the_limits_that_baton_has() -> None:
    command = server_command(
        Path("python"), Path("model"), dtype="float32", port=1234, limits={"max_num_seqs": 64, "max_model_len": 1024}
    )

    assert "--max-num-seqs=64" in command
    assert "--max-model-len=1024" in command
    assert command[command.index("--port") + 1] == "1234"
    assert command[command.index("--dtype") + 1] == "float32"
