"""Why a cluster does not come up, replica by replica."""

from __future__ import annotations

from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
)

from cluster.deploy.deployment import explain
from cluster.serve.start_report import StartReport


def overview(status: DeploymentStatus, message: str = "", **states: int) -> DeploymentStatusOverview:
    return DeploymentStatusOverview(
        status=status,
        status_trigger=DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
        replica_states={ReplicaState[name.upper()]: count for name, count in states.items()},
        message=message,
    )


def test_every_replica_that_does_not_run_is_accounted_for() -> None:
    application = ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOYING,
        message="",
        last_deployed_time_s=0,
        deployments={
            "prefill": overview(DeploymentStatus.HEALTHY, running=1),
            "decode": overview(DeploymentStatus.UPDATING, "Tried twice.\nNo node has a GPU.", running=1, starting=2),
        },
    )
    reports = [
        StartReport(role="decode", replica_id="abc", stage="loading weights"),
        StartReport(role="decode", replica_id="def", stage="ready"),
        StartReport(role="prefill", replica_id="ghi", stage="starting the engine"),
    ]

    assert explain(application, reports) == (
        "decode: 1 running, 2 starting, abc is at 'loading weights', No node has a GPU."
    )


def test_states_are_told_as_serve_names_them_over_the_wire() -> None:
    """Not by members of its enum: `serve.status` hands on what its messages say."""
    status = overview(DeploymentStatus.UPDATING, "It failed.", running=1)
    status.replica_states = {"RUNNING": 1, "STARTING": 2}  # type: ignore[dict-item]
    application = ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOY_FAILED, message="", last_deployed_time_s=0, deployments={"decode": status}
    )

    assert explain(application, []) == "decode: 1 running, 2 starting, It failed."


def test_serve_that_knows_nothing_is_said() -> None:
    assert explain(None, []) == "Serve does not know the application"
