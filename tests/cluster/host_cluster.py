"""A cluster on test hosts: a head, one machine for prefill, two for decode; this machine is operator and client."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.hosts import HOME, Host, Hosts
from tests.cluster.ray_up import Launcher
from tests.support.cluster.http_completions import read_status

NODE = ". ~/baton/deploy/node.sh"
JOIN_TIMEOUT_S = 600.0
WAIT_TIMEOUT_S = 600.0
DEPLOY_TIMEOUT_S = 900.0
POLL_PERIOD_S = 0.5


@dataclass(slots=True, kw_only=True)
class HostCluster:
    """The hosts, and what an operator does with them."""

    hosts: Hosts
    head: Host
    prefill: Host
    decode: tuple[Host, Host]
    launcher: Launcher
    model: Path

    @classmethod
    def start(cls, hosts: Hosts, *, model: Path) -> HostCluster:
        """Boot four machines and call `ray up`; every node has joined when this returns."""
        head, prefill, *decode = (hosts.add() for _ in range(4))
        launcher = Launcher.prepare(
            hosts.folder / "operator", key=hosts.key, head=head, prefill=[prefill], decode=decode, models=model
        )
        launcher.up()
        cluster = cls(
            hosts=hosts, head=head, prefill=prefill, decode=(decode[0], decode[1]), launcher=launcher, model=model
        )
        cluster.wait_for_nodes(4)
        return cluster

    @property
    def workers(self) -> tuple[Host, ...]:
        """The machines that run engines and routers."""
        return (self.prefill, *self.decode)

    @property
    def url(self) -> str:
        """Where the API answers on the prefill machine, which none of the tests harm."""
        return f"http://{self.prefill.address}:8000"

    def ray_status(self) -> str:
        """The nodes, as Ray's autoscaler reports them."""
        return self.head.ssh(f"{NODE}; ray status").stdout

    def wait_for_nodes(self, count: int) -> None:
        """Return when so many nodes are active."""
        self.wait(lambda: f"\n {count} local.cluster.node" in self.ray_status(), f"{count} nodes", JOIN_TIMEOUT_S)

    def deploy(self, config: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """Call `baton deploy` on the head."""
        (self.head.disk / "baton.yaml").write_text(yaml.safe_dump(dict(config)))
        return self.baton("deploy", "--config", f"{HOME}/baton.yaml")

    def baton(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call `baton` on the head."""
        return self.head.ssh(f"{NODE}; baton {' '.join(arguments)}", timeout_s=DEPLOY_TIMEOUT_S)

    def restart_head(self) -> None:
        """Kill all of Ray on the head, and start it again as `ray up` did."""
        commands = yaml.safe_load(self.launcher.config.read_text())["head_start_ray_commands"]
        self.head.run(f"{NODE}; ray stop --force")
        self.head.run(f"export RAY_CLOUD_INSTANCE_ID={self.head.address}; {commands[-1]}")

    def num_living_nodes(self) -> int:
        """Nodes that Ray's head knows to live."""
        script = "import ray; ray.init(); print(sum(node['Alive'] for node in ray.nodes()))"
        return int(self.head.run(f'{NODE}; python -c "{script}" 2>/dev/null').split()[-1])

    def status(self) -> dict[str, Any]:
        """The cluster's /status."""
        return read_status(self.url)

    def replicas(self, pool: str) -> list[dict[str, Any]]:
        """The rows of one pool."""
        rows: list[dict[str, Any]] = self.status()["pools"][pool]
        return rows

    def wait(self, is_true: Callable[[], bool], what: str, timeout_s: float = WAIT_TIMEOUT_S) -> float:
        """Return when something has become true, with the seconds it took."""
        started_s = time.monotonic()
        while not self._holds(is_true):
            if time.monotonic() - started_s > timeout_s:
                raise AssertionError(f"no {what} within {timeout_s:.0f} s\n{self.describe()}")
            time.sleep(POLL_PERIOD_S)
        return time.monotonic() - started_s

    def _holds(self, is_true: Callable[[], bool]) -> bool:
        try:
            return is_true()
        except (httpx.TransportError, AssertionError, subprocess.TimeoutExpired):
            return False

    def describe(self) -> str:
        """Information that helps to understand a failure."""
        logs = "tail -n 40 /tmp/ray/session_latest/logs/monitor.out /tmp/ray/session_latest/logs/serve/controller*.log"
        said = [self.ray_status(), self.head.ssh(logs).stdout]
        for host in self.workers:
            if host.init.poll() is None:
                errors = host.ssh("tail -qn 15 /tmp/ray/session_latest/logs/worker*.err").stdout
                said.append(f"--- {host.address}\n{errors}")
        return "\n".join(said)
