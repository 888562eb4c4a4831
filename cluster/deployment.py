"""Brings a cluster up on a Ray that is there, and tells how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from cluster.app import build_graph
from cluster.config import BatonConfig
from cluster.names import APP_NAME
from cluster.placement import Machine, usable_cores
from cluster.served_model import ServedModel
from cluster.start_report import StartReport, clear_start_reports, read_start_reports

POLL_PERIOD_S = 0.2

Progress = Callable[[Sequence[StartReport], str], None]
"""Called while the cluster starts, with what each worker says and with a line about the whole."""


class StartError(Exception):
    """The cluster cannot serve: one line that says why."""


class RefusedStartError(StartError):
    """It never will with these settings: a worker refused them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One cluster on one Ray."""

    config: BatonConfig
    model: ServedModel

    def start_http(self) -> None:
        """Start Serve itself, with its proxy on the configured address."""
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="HeadOnly" if self.config.address is None else "EveryNode",
            http_options={"host": self.config.host, "port": self.config.port},
        )

    def start_replicas(self, progress: Progress) -> None:
        """Deploy, and wait until every replica is ready.

        Raises:
            StartError: A replica cannot start, or not all of them started in time.
        """
        clear_start_reports()
        graph = build_graph(self.config, self.model, self._machine())
        serve._run(graph, _blocking=False, name=APP_NAME, route_prefix="/")
        self._wait(progress)

    def _wait(self, progress: Progress) -> None:
        deadline_s = time.monotonic() + self.config.startup_timeout_s
        while True:
            reports = read_start_reports()
            refusal = next((report.refusal for report in reports if report.refusal is not None), None)
            if refusal is not None:
                raise RefusedStartError(refusal)
            application = serve.status().applications.get(APP_NAME)
            status = application.status if application is not None else ApplicationStatus.NOT_STARTED
            progress(reports, str(status.value))
            if application is not None and status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise StartError(_reason(application))
            if status == ApplicationStatus.RUNNING:
                return
            if time.monotonic() > deadline_s:
                raise StartError(
                    f"not all workers were ready within {self.config.startup_timeout_s:g} s: {_reason(application)}"
                )
            time.sleep(POLL_PERIOD_S)

    def _machine(self) -> Machine:
        """What Ray has; of a private Ray's CPUs only those that are really there."""
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        is_private = self.config.address is None
        return Machine(
            num_cores=usable_cores() if is_private else int(resources.get("CPU", 1.0)),
            num_gpus=resources.get("GPU", 0.0),
        )

    def remove(self) -> None:
        """Take the cluster off a Ray that goes on."""
        serve.delete(APP_NAME)


def _reason(application: object) -> str:
    """The last line of what Serve says about the first deployment that is not healthy."""
    deployments = getattr(application, "deployments", {})
    for name, deployment in deployments.items():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        if lines and deployment.status.value != "HEALTHY":
            return f"{name}: {lines[-1]}"
    return getattr(application, "message", "") or "Serve does not know the application"
