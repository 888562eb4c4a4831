"""A deployed cluster on two Ray nodes of this machine, of which the second is restarted when it dies."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.client import bearer
from router.security import hash_key, new_key
from tests.support.cluster.cluster import BATON
from tests.support.cluster.ports import free_port
from tests.support.cluster.shared_ray import SECOND_NODE_IP, SharedRayProcess, run_on, second_node, shared_ray

__all__ = ["SECOND_NODE_IP", "TwoNodes", "two_nodes"]

DEPLOY_TIMEOUT_S = 400.0
_LOOK_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNodes:
    """The URL of the cluster, and how to deploy it again."""

    url: str
    folder: Path
    config: Mapping[str, Any]
    ray: SharedRayProcess
    admin_key: str

    @property
    def headers(self) -> dict[str, str]:
        """Headers with the admin key, for /status and orders to workers."""
        return bearer(self.admin_key)

    def deploy_command(self, name: str, **changes: Any) -> list[str]:
        """The command of a `baton deploy` with a changed configuration, which is stored in a file of that name."""
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**self.config, **changes}))
        assignments = [f"{variable}={value}" for variable, value in self.ray.environment.items()]
        return ["env", *assignments, str(BATON), "deploy", "--config", str(file)]


@contextmanager
def two_nodes(folder: Path, config: Mapping[str, Any]) -> Iterator[TwoNodes]:
    """Start Ray twice and deploy. Clients use one proxy, on the node that stays."""
    port = free_port()
    key = new_key()
    with shared_ray() as ray, _kept_alive(ray):
        run_on(ray, f"serve.start(proxy_location='HeadOnly', http_options={{'host': '127.0.0.1', 'port': {port}}})")
        deployed = TwoNodes(
            url=f"http://127.0.0.1:{port}",
            folder=folder,
            config={**config, "address": ray.address, "port": port, "security": {"admin_keys": [hash_key(key)]}},
            ray=ray,
            admin_key=key,
        )
        command = deployed.deploy_command("first")
        result = subprocess.run(command, capture_output=True, text=True, timeout=DEPLOY_TIMEOUT_S, check=False)
        if result.returncode:
            raise RuntimeError(f"baton deploy ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        yield deployed


@contextmanager
def _kept_alive(ray: SharedRayProcess) -> Iterator[None]:
    """The second node, which is restarted whenever it ends, as a host's supervisor would do."""
    is_up, is_over = threading.Event(), threading.Event()

    def keep() -> None:
        while not is_over.is_set():
            with second_node(ray) as process:
                is_up.set()
                while process.is_running() and process.status() != "zombie" and not is_over.wait(_LOOK_PERIOD_S):
                    pass

    thread = threading.Thread(target=keep, name="second-node")
    thread.start()
    try:
        if not is_up.wait(DEPLOY_TIMEOUT_S):
            raise RuntimeError("the second node did not start")
        yield
    finally:
        is_over.set()
        thread.join()
