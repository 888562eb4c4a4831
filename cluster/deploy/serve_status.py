"""Asks Serve's controller, which may be gone or restarting, what Serve runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from cluster.config.names import APP_NAME
from cluster.plan.placement import RunningPool
from router.roles import ROLES

ASK_TIMEOUT_S = 30.0


def applications() -> Mapping[str, ApplicationStatusOverview] | None:
    """Serve's applications by name: none once it was shut down; None while its controller restarts and cannot say."""
    try:
        return serve.status().applications
    except ActorUnavailableError:
        return None
    except (RayActorError, RayServeException):
        return {}


def running_pools() -> Mapping[str, RunningPool]:
    """Serve's pools, each with its target number of workers: as deployed, or as chosen by Serve's autoscaler.

    While Serve builds an application from its own configuration file, it does not list the pools that still run. For
    these the number of running workers counts. This uses private parts of Serve; Ray is pinned to one version.

    Raises:
        RayError: Serve's controller restarts, or does not answer.
    """
    client: Any = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    controller = client._controller
    asked = (
        controller.get_serve_instance_details.remote(),
        controller.list_deployments_internal.remote(),
        controller._all_running_replicas.remote(),
    )
    try:
        told, known, replicas = ray.get(list(asked), timeout=ASK_TIMEOUT_S)
    except ActorUnavailableError:
        raise
    except RayActorError:  # Serve was shut down
        return {}
    listed: Mapping[str, Any] = told["applications"].get(APP_NAME, {}).get("deployments", {})
    pools: dict[str, RunningPool] = {}
    for role in ROLES:
        name = DeploymentID(role, APP_NAME)
        number = int(listed[role]["target_num_replicas"]) if role in listed else len(replicas.get(name, ()))
        if number > 0:
            demands = known[name][0].replica_config.resource_dict if name in known else None
            pools[role] = RunningPool(num_replicas=number, demands=demands)
    return pools


def delete_application() -> None:
    """Delete our application from a Serve that goes on. If that takes longer than a minute, because workers drain, this
    returns and Serve finishes it alone."""
    with contextlib.suppress(TimeoutError):
        serve.delete(APP_NAME)
