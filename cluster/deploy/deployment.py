"""Brings a cluster up on a running Ray, and reports the progress."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentStatus, ReplicaState
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.config.served_model import ServedModel
from cluster.deploy.claim import Claim
from cluster.deploy.deploy_record import record_told
from cluster.deploy.ray_home import list_nodes
from cluster.deploy.serve_start import ProxyError, ProxyPlace, begin_serve, last_line, wait_for_proxies
from cluster.deploy.serve_status import applications, running_pools
from cluster.plan.growth import growth_warnings
from cluster.plan.inventory import Node, nodes_of_ray
from cluster.plan.placement import NOTHING_RUNS, Placement, place, usable_cores
from cluster.plan.plan import placement_problem, transfer_problem, transfer_warnings
from cluster.serve.graph import build_graph
from cluster.serve.server_info import record_effective
from cluster.serve.start_report import StartReport, clear_start_reports, read_start_reports
from engine.contract.errors import ConfigError

POLL_PERIOD_S = 0.2

Progress = Callable[[Sequence[StartReport], str], None]
"""Called while the cluster starts, with every worker's report and one line about the whole cluster."""


class StartError(Exception):
    """The cluster cannot serve. The message is one line that says why."""


class RefusedStartError(StartError):
    """The cluster can never serve with these settings, because a worker refused them."""


class TakenOffError(StartError):
    """The cluster was shut down by another command while it started."""

    def __init__(self) -> None:
        super().__init__("the cluster was removed while it started, for example by `baton shutdown`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One cluster on one Ray."""

    config: BatonConfig
    model: ServedModel
    claim: Claim | None = None
    """The command that deploys it; None on a private Ray, which has no other users."""
    own_admin_key: str | None = None
    """Hash of the key for orders, where no admin key is configured."""

    def place(self) -> Placement:
        """The placement on the machines that Ray has now. Pools that already run and follow their load keep their size.

        Raises:
            ConfigError: The machines do not have what the configuration asks for.
        """
        nodes = self._nodes()
        running = running_pools() if self.config.address is not None else NOTHING_RUNS
        placement = place(self.config, nodes, running=running)
        problem = transfer_problem(self.config, placement)
        if problem:
            raise ConfigError(problem)
        if self.config.address is None:  # a shared Ray may still get more machines
            problem = placement_problem(self.config, nodes, placement)
            if problem:
                raise ConfigError(problem)
        return placement

    def warnings(self) -> list[str]:
        """Warnings about the network between machines, and about pools that cannot grow as far as configured.

        Raises:
            ConfigError: The machines do not have what the configuration asks for.
        """
        return [*transfer_warnings(self.config, self.place()), *growth_warnings(self.config, self._nodes())]

    def _nodes(self) -> list[Node]:
        """The machines that Ray has now. A private Ray claims more CPUs than exist, so its number is corrected."""
        nodes = nodes_of_ray(list_nodes())
        if self.config.address is not None:
            return nodes
        return [dataclasses.replace(node, num_cores=usable_cores()) for node in nodes]

    def start(self, progress: Progress) -> None:
        """Start Serve, with its proxies on the configured address, and deploy; wait until every replica is ready.

        Raises:
            ConfigError: The machines do not have what the configuration asks for.
            StartError: A proxy cannot listen, a replica cannot start, or not all of them started in time.
        """
        self.hand_over()
        self.wait(progress)

    def hand_over(self) -> None:
        """Start Serve, with its proxies on the configured address, and tell it what to run; wait for the proxies only.

        The record is written before Serve is told. Serve then goes on, even if this process ends.

        Raises:
            ConfigError: The machines do not have what the configuration asks for.
            StartError: A proxy cannot listen, or Serve did not take the application.
        """
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        config = self.config
        placement = self.place()
        model_digest = self.model.digest() if self.claim is not None else ""
        self._record(model_digest, is_taken=False)
        proxies = begin_serve(host=config.host, port=config.port, location=_proxy_place(config))
        clear_start_reports()
        graph = build_graph(config, self.model, placement, own_admin_key=self.own_admin_key)
        try:
            serve._run(graph, _blocking=False, name=APP_NAME, route_prefix="/")
        except (RayError, RayServeException) as error:
            raise StartError(f"Serve refused the application: {last_line(error)}") from error
        self._record(model_digest, is_taken=True)
        record_effective(config, self.model, self.own_admin_key)
        try:
            wait_for_proxies(proxies, timeout_s=config.startup_timeout_s)
        except ProxyError as error:
            raise StartError(str(error)) from error

    def _record(self, model_digest: str, *, is_taken: bool) -> None:
        if self.claim is not None:
            record_told(self.config, self.claim, model_digest=model_digest, is_taken=is_taken)

    def _explained(self, report: StartReport) -> str:
        """Why a worker refuses to start, with settings named by their keys in the configuration."""
        refusal = report.refusal or ""
        return self.config.with_keys(refusal, report.role) if report.role in self.config.pools else refusal

    def wait(self, progress: Progress) -> None:
        """Return when every replica is ready.

        Raises:
            StartError: A replica cannot start, not all of them started in time, or the cluster was shut down.
        """
        deadline_s = time.monotonic() + self.config.startup_timeout_s
        was_there = False
        while True:
            reports = read_start_reports()
            refused = next((report for report in reports if report.refusal is not None), None)
            if refused is not None:
                raise RefusedStartError(self._explained(refused))
            known = applications()
            application = (known or {}).get(APP_NAME)
            if was_there and known is not None and application is None:
                raise TakenOffError
            was_there = was_there or application is not None
            status = application.status if application is not None else ApplicationStatus.NOT_STARTED
            progress(reports, str(status.value))
            if application is not None and status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise StartError(explain(application, reports))
            if status == ApplicationStatus.RUNNING:
                return
            if time.monotonic() > deadline_s:
                raise StartError(
                    f"not all workers were ready within {self.config.startup_timeout_s:g} s: "
                    f"{explain(application, reports)}"
                )
            time.sleep(POLL_PERIOD_S)


def _proxy_place(config: BatonConfig) -> ProxyPlace:
    if config.routers_listen:
        return "Disabled"
    return "HeadOnly" if config.address is None else "EveryNode"


def explain(application: ApplicationStatusOverview | None, reports: Sequence[StartReport]) -> str:
    """What is missing, for each deployment: how many replicas run, the last report of each other replica, and Serve's
    message about them."""
    if application is None:
        return "Serve does not know the application"
    lacking = [
        _explain_deployment(name, status, [report for report in reports if report.role == name])
        for name, status in application.deployments.items()
        if status.status != DeploymentStatus.HEALTHY
    ]
    return "; ".join(lacking) or application.message


def _explain_deployment(name: str, status: DeploymentStatusOverview, reports: Sequence[StartReport]) -> str:
    # Serve declares enum members here, but returns their names.
    counts = {ReplicaState(state).value: count for state, count in status.replica_states.items() if count}
    states = ", ".join(f"{count} {state.lower().replace('_', ' ')}" for state, count in counts.items())
    parts = [f"{name}: {states or 'no replicas'}"]
    parts.extend(f"{report.replica_id} is at '{report.stage}'" for report in reports if report.stage != "ready")
    lines = [line.strip() for line in status.message.splitlines() if line.strip()]
    return ", ".join([*parts, *lines[-1:]])
