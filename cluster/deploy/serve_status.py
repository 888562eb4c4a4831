"""What Serve runs, asked of a controller that may have gone or be restarting."""

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
    """The pools that Serve has, each with as many workers as it means to run: those that were deployed, or that its
    autoscaler chose.

    While it builds an application that a configuration file of its own describes, it lists none of the pools that go
    on meanwhile: of these as many count as run. What is asked here is private to Serve, and Ray is pinned to one
    version.

    Raises:
        RayError: Its controller restarts, or does not answer.
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
    """Take our application off a Serve that goes on. Serve does it by itself when it takes longer than a minute, as it
    does where workers drain for so long."""
    with contextlib.suppress(TimeoutError):
        serve.delete(APP_NAME)
