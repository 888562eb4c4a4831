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


def target_replicas() -> Mapping[str, int]:
    """How many workers Serve means to run of each pool that it has: what was deployed, or what its autoscaler chose.

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
    try:
        told, running = ray.get(
            [controller.get_serve_instance_details.remote(), controller._all_running_replicas.remote()],
            timeout=ASK_TIMEOUT_S,
        )
    except ActorUnavailableError:
        raise
    except RayActorError:  # Serve was shut down
        return {}
    listed: Mapping[str, Any] = told["applications"].get(APP_NAME, {}).get("deployments", {})
    targets = {
        role: int(listed[role]["target_num_replicas"])
        if role in listed
        else len(running.get(DeploymentID(role, APP_NAME), ()))
        for role in ROLES
    }
    return {role: number for role, number in targets.items() if number > 0}


def delete_application() -> None:
    """Take our application off a Serve that goes on. Serve does it by itself when it takes longer than a minute, as it
    does where workers drain for so long."""
    with contextlib.suppress(TimeoutError):
        serve.delete(APP_NAME)
