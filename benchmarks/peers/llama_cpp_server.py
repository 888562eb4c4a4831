"""llama.cpp as a peer over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.process import ROOT, peer_environment, peer_python
from benchmarks.process_group import served_group
from benchmarks.served import free_port

NAME = "llama-cpp"
START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def served_llama_cpp(model: Path, *, num_threads: int, context_tokens: int, lookup: bool) -> Iterator[str]:
    """Run the peer on a free port; yields its URL once it is ready."""
    port = free_port()
    command = [
        *(str(peer_python(NAME)), "-m", "benchmarks.peers.llama_cpp", str(model), "--port", str(port)),
        *("--threads", str(num_threads), "--context", str(context_tokens), *(["--lookup"] if lookup else [])),
    ]
    environment = {**peer_environment(NAME, num_threads), "PYTHONPATH": str(ROOT)}
    url = f"http://127.0.0.1:{port}"
    with served_group(
        command,
        ready_url=f"{url}/health",
        environment=environment,
        directory=ROOT,
        start_timeout_s=START_TIMEOUT_S,
    ):
        yield url
