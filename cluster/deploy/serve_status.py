"""What Serve runs, asked of a controller that may have gone or be restarting."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from cluster.config.names import APP_NAME


def applications() -> Mapping[str, ApplicationStatusOverview] | None:
    """Serve's applications by name: none once it was shut down; None while its controller restarts and cannot say."""
    try:
        return serve.status().applications
    except ActorUnavailableError:
        return None
    except (RayActorError, RayServeException):
        return {}


def delete_application() -> None:
    """Take our application off a Serve that goes on. Serve does it by itself when it takes longer than a minute, as it
    does where workers drain for so long."""
    with contextlib.suppress(TimeoutError):
        serve.delete(APP_NAME)
