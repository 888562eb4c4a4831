"""`baton deploy`: bring a cluster on a running Ray in line with a configuration, and return. `baton shutdown`: end it.

Imports Ray and Serve, which read their environment at that moment: apply ``cluster.serve_env`` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from rich.console import Console

from cluster.config import BatonConfig
from cluster.deploy_record import (
    changed_keys,
    forbidden_changes,
    forget_deployed,
    is_serving,
    read_deployed,
    record_deployed,
)
from cluster.deployment import Deployment, RefusedStartError, StartError, TakenOffError
from cluster.inventory import nodes_of_ray
from cluster.names import APP_NAME
from cluster.plan import make_plan
from cluster.ray_home import check_http, connect, list_nodes
from cluster.readiness import url_of, wait_until_ready
from cluster.serve_status import delete_application
from cluster.served_model import ServedModel
from cluster.signals import Stopped, stop_on_signals
from cluster.start_display import StartDisplay
from engine.errors import ConfigError

ANY_ADDRESS = ("0.0.0.0", "::")


def deploy(config: BatonConfig, model: ServedModel, address: str, console: Console) -> None:
    """Deploy or update, and wait until it serves. An update that fails is taken back.

    Raises:
        RayUnavailableError, RefusedStartError: Nothing was changed.
        StartError: It could not start; what ran before runs again.
    """
    connect(address)
    # Ray installs a handler for SIGTERM that exits at once.
    stop_on_signals()
    try:
        is_there = is_deployed()
        if is_there and is_serving():
            raise RefusedStartError(
                f"the cluster on the Ray at {address} is that of a `baton serve`, which takes it off when it ends: "
                "stop that one first (`baton shutdown` if it is gone), or deploy to another Ray"
            )
        running = read_deployed() if is_there else None
        refuse(config, model, running, address)
        _announce(running, config, console)
        with StartDisplay(console) as display, saying_what_goes_on(console):
            try:
                _bring_up(Deployment(config=config, model=model), display)
            except TakenOffError:  # whoever did that wants nothing back
                raise
            except StartError as error:
                _take_back(running, model, display, error)
        record_deployed(config)
        urls = ", ".join(url_of(address, config.port) for address in proxy_addresses(config))
        console.print(f"Serving {model.name} on {urls}", markup=False, highlight=False, soft_wrap=True)
    finally:
        ray.shutdown()


@contextmanager
def saying_what_goes_on(console: Console) -> Iterator[None]:
    """Tell somebody who stops waiting that Serve does not stop."""
    try:
        yield
    except Stopped:
        console.print(
            "no longer waiting, but Serve goes on: `baton deploy` again waits for it, `baton shutdown` ends it",
            highlight=False,
            soft_wrap=True,
        )
        raise


def refuse(config: BatonConfig, model: ServedModel, running: BatonConfig | None, address: str) -> None:
    """Find what is wrong before anything changes.

    Raises:
        RayUnavailableError: Serve listens elsewhere, or its application is not ours to update.
        RefusedStartError: It does not fit the machines, or what runs cannot become it.
    """
    check_http(address=address, host=config.host, port=config.port)
    forbidden = forbidden_changes(running, config) if running is not None else []
    if forbidden:
        raise RefusedStartError(
            f"what runs cannot become this without breaking answers in progress ({'; '.join(forbidden)}): run "
            "`baton shutdown` first, or deploy to another Ray"
        )
    try:
        plan = make_plan(config, model, nodes_of_ray(list_nodes()))
    except ConfigError as error:
        raise RefusedStartError(str(error)) from error
    if plan.problems:
        raise RefusedStartError("; ".join(plan.problems))


def shutdown(address: str, console: Console) -> None:
    """End what `baton deploy` started, and Serve with it unless others use it. Nothing there is no error.

    Raises:
        RayUnavailableError: There is no Ray at the address.
    """
    connect(address)
    stop_on_signals()
    try:
        is_there = is_deployed()
        if is_there:
            remove()
        console.print("stopped" if is_there else "nothing is deployed", highlight=False)
    finally:
        ray.shutdown()


def remove() -> None:
    """Take our application off, and Serve too unless others use it."""
    if set(serve.status().applications) - {APP_NAME}:
        delete_application()
    else:
        serve.shutdown()  # type: ignore[no-untyped-call]
    forget_deployed()


def is_deployed() -> bool:
    """True when Serve knows our application."""
    try:
        return APP_NAME in serve.status().applications
    except ray.serve.exceptions.RayServeException:  # Serve does not run
        return False


def _bring_up(deployment: Deployment, display: StartDisplay) -> None:
    display.stage("starting Ray Serve")
    deployment.start(display.workers)
    display.stage("waiting until every machine answers")
    for address in proxy_addresses(deployment.config):
        wait_until_ready(url_of(address, deployment.config.port))


def _take_back(running: BatonConfig | None, model: ServedModel, display: StartDisplay, error: StartError) -> None:
    """Return to what ran before, if anything; always raises, with what became of it."""
    if running is None:
        remove()
        raise error
    display.stage(f"going back to what ran before: {error}")
    try:
        _bring_up(Deployment(config=running, model=model), display)
    except StartError as second:
        raise StartError(f"{error}; what ran before did not come back: {second}") from second
    raise type(error)(f"{error} (what ran before runs again)") from error


def _announce(running: BatonConfig | None, config: BatonConfig, console: Console) -> None:
    changed: Sequence[str] = changed_keys(running, config) if running is not None else ()
    if running is None:
        return
    what = f"updating: {', '.join(changed)}" if changed else "the configuration is the one that runs"
    console.print(what, markup=False, highlight=False, soft_wrap=True)


def proxy_addresses(config: BatonConfig) -> list[str]:
    """Where the API must answer: on every machine that runs something of ours, unless one address was asked for."""
    if config.host not in ANY_ADDRESS:
        return [config.host]
    client: Any = _get_global_client()
    deployments: Mapping[str, Any] = client.get_serve_details()["applications"][APP_NAME]["deployments"]
    return sorted({str(replica["node_ip"]) for item in deployments.values() for replica in item["replicas"]})
