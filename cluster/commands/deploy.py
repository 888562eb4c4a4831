"""`baton deploy`: bring a cluster on a running Ray in line with a configuration, and return. `baton shutdown`: end it.

Imports Ray and Serve, which read their environment at that moment: apply ``cluster.deploy.serve_env`` first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from cluster.commands.ray_waits import ending_waits
from cluster.commands.signals import Stopped, stop_on_signals
from cluster.commands.start_display import StartDisplay
from cluster.commands.welcome import open_api_warning
from cluster.config.api_url import url_of
from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.config.served_model import ServedModel
from cluster.deploy.claim import DEPLOY, SERVE
from cluster.deploy.deploy_record import (
    PLACES,
    DeployRecord,
    changed_keys,
    forbidden_changes,
    forget_deployed,
    read_deploy_record,
    record_came_up,
)
from cluster.deploy.deployment import Deployment, RefusedStartError, StartError, TakenOffError
from cluster.deploy.ray_home import RayUnavailableError, check_http, connect, hold, is_deployed, is_occupied, list_nodes
from cluster.deploy.readiness import wait_until_ready
from cluster.deploy.serve_start import last_line
from cluster.deploy.serve_status import applications, delete_application, running_pools
from cluster.plan.inventory import nodes_of_ray
from cluster.plan.plan import Plan, make_plan
from engine.contract.errors import ConfigError

ANY_ADDRESS = ("0.0.0.0", "::")


def deploy(config: BatonConfig, model: ServedModel, address: str, console: Console) -> None:
    """Deploy or update, and wait until the cluster serves. A failed update is rolled back.

    Raises:
        RayUnavailableError, RefusedStartError: Nothing was changed.
        StartError: It could not start, and the earlier configuration runs again; or Ray was lost during the start.
    """
    with _connected(address, StartError):
        held = hold(DEPLOY, what=model.at(config), address=address)
        try:
            _update(Deployment(config=config, model=model, claim=held.claim), address, console)
        finally:
            held.give_back()


@contextmanager
def _connected(address: str, lost: type[Exception]) -> Iterator[None]:
    """Stay connected to a Ray as a driver within this block.

    Raises:
        RayUnavailableError: There is no Ray at the address.
        Exception: Of type ``lost``: the Ray, or its Serve, no longer answers.
    """
    connect(address)
    # Ray installs a handler for SIGTERM that exits at once.
    stop_on_signals()
    try:
        yield
    except (RayError, RayServeException) as error:
        raise lost(
            f"the Ray at {address} stopped answering: {last_line(error)}; Serve keeps what was deployed until then: "
            "check `ray status` there, and run the command again"
        ) from error
    finally:
        ray.shutdown()


def _update(deployment: Deployment, address: str, console: Console) -> None:
    config, model = deployment.config, deployment.model
    before = look(address)
    plan = refuse(config, model, before, address)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    _announce(before, config, console)
    with StartDisplay(console) as display, saying_what_goes_on(console), ending_waits():
        try:
            _bring_up(deployment, display)
        except TakenOffError:  # the cluster was shut down on purpose: do not roll back
            raise
        except StartError as error:
            _take_back(before, deployment, display, error)
        record_came_up(config)
    urls = ", ".join(url_of(address, config.port) for address in proxy_addresses(config))
    console.print(f"Serving {model.name} on {urls}", markup=False, highlight=False, soft_wrap=True)
    if open_api := open_api_warning(config):
        console.print(open_api, markup=False, highlight=False, soft_wrap=True)


def look(address: str) -> DeployRecord | None:
    """The record of the application on the Ray that we are connected to; None if there is no application.

    If the application runs, a configuration that was deployed without waiting counts as having come up.

    Raises:
        RayUnavailableError: The application is being deleted, or Serve cannot say.
    """
    if not is_occupied(address):
        forget_deployed()  # the record of an application that was deleted by other means
        return None
    record = read_deploy_record()
    told = record.told
    if told is None or not told.is_taken or told.recorded is None or not told.recorded.is_whole:
        return record
    application = (applications() or {}).get(APP_NAME)
    if application is None or application.status != ApplicationStatus.RUNNING:
        return record
    record_came_up(told.recorded.config)
    return dataclasses.replace(record, came_up=told.recorded)


@contextmanager
def saying_what_goes_on(console: Console) -> Iterator[None]:
    """If the user stops waiting, print that Serve goes on."""
    try:
        yield
    except Stopped:
        console.print(
            "no longer waiting, but Serve continues: wait again with `baton deploy`, or stop it with `baton shutdown`",
            highlight=False,
            soft_wrap=True,
        )
        raise


def refuse(config: BatonConfig, model: ServedModel, before: DeployRecord | None, address: str) -> Plan:
    """Check a deployment before anything changes; returns its plan.

    Raises:
        RayUnavailableError: Serve listens on another address.
        RefusedStartError: It does not fit the machines, or what runs now is not ours, or cannot be updated to it.
    """
    check_http(address=address, host=config.host, port=config.port)
    if before is not None:
        _refuse_over(before, config, model, address)
    try:
        plan = make_plan(config, model, nodes_of_ray(list_nodes()), running=running_pools())
    except ConfigError as error:
        raise RefusedStartError(str(error)) from error
    if plan.problems:
        raise RefusedStartError("; ".join(plan.problems))
    return plan


def _refuse_over(before: DeployRecord, config: BatonConfig, model: ServedModel, address: str) -> None:
    """Compare with all configurations that may run: two of them after an update that nobody waited for."""
    shutdown_first = f"run `baton shutdown --address {address}` first, or deploy to another Ray"
    if before.told is not None and before.told.claim.command == SERVE:
        raise RefusedStartError(
            f"the Ray at {address} still runs the cluster of a `baton serve` that ended: {before.told.claim}: "
            f"{shutdown_first}"
        )
    if not before.configs:
        raise RefusedStartError(
            f"a Baton cluster runs on the Ray at {address}, but its model is not known, probably because another "
            f"version of Baton deployed it: {shutdown_first}"
        )
    forbidden = dict.fromkeys(change for old in before.configs for change in forbidden_changes(old, config))
    if forbidden:
        raise RefusedStartError(
            f"the running cluster cannot be updated to this configuration without breaking answers in progress "
            f"({'; '.join(forbidden)}): "
            f"{shutdown_first}"
        )
    digest = before.told.model_digest if before.told is not None else ""
    if digest and digest != model.digest():
        raise RefusedStartError(
            f"the files in {model.path} have changed since they were deployed: new workers would give other answers "
            f"than the running ones; put the old files back, or {shutdown_first}"
        )


def shutdown(address: str, console: Console) -> None:
    """End what `baton deploy` started, and Serve too unless other applications use it. No error if nothing runs.

    Raises:
        RayUnavailableError: There is no Ray at the address, it stopped answering, or Serve cannot say what runs.
    """
    with _connected(address, RayUnavailableError):
        is_there = is_deployed(address) or _is_begun()
        if is_there:
            remove()
        console.print("stopped" if is_there else "nothing is deployed", highlight=False)


def _is_begun() -> bool:
    """True when a deployment was recorded and Serve runs, even if Serve has no application of ours."""
    return (
        read_deploy_record().told is not None and _get_global_client(raise_if_no_controller_running=False) is not None
    )


def remove() -> None:
    """Delete our application, and shut Serve down unless other applications use it."""
    known = applications()
    if known is None or set(known) - {APP_NAME}:
        delete_application()
    else:
        serve.shutdown()  # type: ignore[no-untyped-call]
    forget_deployed()


def _bring_up(deployment: Deployment, display: StartDisplay) -> None:
    display.stage("starting Ray Serve")
    deployment.start(display.workers)
    display.stage("waiting until every machine answers")
    for address in proxy_addresses(deployment.config):
        wait_until_ready(url_of(address, deployment.config.port))


def _take_back(before: DeployRecord | None, failed: Deployment, display: StartDisplay, error: StartError) -> None:
    """Roll back to the earlier configuration, if there was one. Always raises an error that says how that went."""
    if before is None:
        remove()
        raise error
    goal = before.came_up or (before.told.recorded if before.told is not None else None)
    if goal is None or not goal.is_whole:
        raise type(error)(
            f"{error} (the previous cluster was deployed by another version of Baton and cannot be restored: deploy a "
            "configuration that works, or run `baton shutdown`)"
        ) from error
    places = {name: getattr(failed.config, name) for name in PLACES}
    deployment = dataclasses.replace(failed, config=goal.config.model_copy(update=places))
    display.stage(f"restoring the previous configuration: {error}")
    try:
        if before.came_up is None:
            deployment.hand_over()
        else:
            _bring_up(deployment, display)
    except (StartError, ConfigError) as second:
        raise StartError(f"{error}; restoring the previous configuration failed: {second}") from second
    outcome = (
        "the previous configuration runs again" if before.came_up else "Serve continues with the previous configuration"
    )
    raise type(error)(f"{error} ({outcome})") from error


def _announce(before: DeployRecord | None, config: BatonConfig, console: Console) -> None:
    if before is None or before.latest is None:
        return
    changed = changed_keys(before.latest, config)
    is_up = before.came_up is not None and not changed_keys(before.came_up.config, config)
    same = "the running one" if is_up else "the one that was deployed before and has not come up yet"
    what = f"updating: {', '.join(changed)}" if changed else f"the configuration is {same}"
    console.print(what, markup=False, highlight=False, soft_wrap=True)


def proxy_addresses(config: BatonConfig) -> list[str]:
    """Addresses where the API must answer: all machines with our processes, or the one configured address."""
    if config.host not in ANY_ADDRESS:
        return [config.host]
    client: Any = _get_global_client()
    deployments: Mapping[str, Any] = client.get_serve_details()["applications"][APP_NAME]["deployments"]
    return sorted({str(replica["node_ip"]) for item in deployments.values() for replica in item["replicas"]})
