"""The commands of `baton` that ask a running cluster, over HTTP.

Slow imports happen inside the command that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from cluster.commands.exits import EXIT_BAD_INPUT, EXIT_FAILURE, fail
from cluster.commands.flags import DEFAULT_URL, AdminKey, Command, Key, Url, is_for_orders
from cluster.commands.signals import stop_on_signals
from router.roles import ROLES

if TYPE_CHECKING:
    from simulation.whatif.calibration import Calibration
    from simulation.whatif.recorded import RecordedRequest

T = TypeVar("T")

clients = typer.Typer()


@clients.command(cls=Command)
def status(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = "",
    json: Annotated[
        bool, typer.Option("--json/--no-json", help="Print the cluster's answer as JSON, unchanged.")
    ] = False,
) -> None:
    """Show the workers of a running cluster."""
    from cluster.commands.clients.status import status as run

    _give(lambda url, key: run(url, Console(), as_json=json, api_key=key), context, url, api_key)


@clients.command(cls=Command)
def top(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: AdminKey = "",
) -> None:
    """Watch a running cluster in the terminal; quit with q or Ctrl-C. Prints once if piped."""
    from cluster.commands.clients.top import top as run

    stop_on_signals()
    _give(lambda url, key: run(url, Console(), api_key=key), context, url, api_key)


@clients.command(cls=Command)
def drain(
    context: typer.Context,
    replica: Annotated[str, typer.Argument(help="Worker id from `baton status`, or its first characters.")],
    url: Url = DEFAULT_URL,
    api_key: AdminKey = "",
    wait_s: Annotated[float, typer.Option(help="Seconds to wait until the worker is gone.")] = 120.0,
) -> None:
    """Let a worker's requests finish or move to others, then stop it. The cluster starts a replacement."""
    from cluster.commands.clients.worker_orders import drain as run

    is_gone = _give(lambda url, key: run(url, replica, Console(), api_key=key, wait_s=wait_s), context, url, api_key)
    raise typer.Exit(0 if is_gone else EXIT_FAILURE)


@clients.command(cls=Command)
def lean(
    context: typer.Context,
    replica: Annotated[str, typer.Argument(help="Worker id from `baton status`, or its first characters.")],
    role: Annotated[str, typer.Argument(help=f"Role to prefer: {' or '.join(ROLES)}.")],
    url: Url = DEFAULT_URL,
    api_key: AdminKey = "",
) -> None:
    """Make a worker prefer one role (with elastic roles). Its running requests continue."""
    from cluster.commands.clients.worker_orders import lean as run

    _give(lambda url, key: run(url, replica, role, Console(), api_key=key), context, url, api_key)


@clients.command(cls=Command)
def trace(
    context: typer.Context,
    request_id: Annotated[
        str, typer.Argument(help="X-Request-Id of an answer, or the id in its body. Without it, the last requests.")
    ] = "",
    url: Url = DEFAULT_URL,
    api_key: AdminKey = "",
    json: Annotated[
        bool, typer.Option("--json/--no-json", help="Print the cluster's answer as JSON, unchanged.")
    ] = False,
) -> None:
    """Show where a request spent its time: where it waited and ran, and how it was routed."""
    from cluster.commands.clients.trace import trace as run

    _give(lambda url, key: run(url, request_id, Console(), as_json=json, api_key=key), context, url, api_key)


def _give(order: Callable[[str, str], T], context: typer.Context, url: str, api_key: str) -> T:
    """Call ``order`` with the cluster's URL and a key for orders, and return its result. An HTTP error is one line."""
    import httpx

    from cluster.client import cluster_url, explain
    from cluster.config.own_admin_key import with_own_key

    url, api_key = with_own_key(cluster_url(url), api_key, is_for_orders=is_for_orders(context))
    try:
        return order(url, api_key)
    except httpx.HTTPError as error:
        raise typer.Exit(fail(explain(error, url), EXIT_FAILURE)) from error


def recorded_requests(context: typer.Context, url: str, api_key: str) -> list[RecordedRequest]:
    """The cluster's records of its last requests."""
    from cluster.commands.clients.recorded import recorded_requests as run

    return _give(lambda url, key: run(url, api_key=key), context, url, api_key)


def reported_calibration(context: typer.Context, url: str, api_key: str) -> Calibration:
    """The calibration from what a cluster's workers report about themselves."""
    from cluster.commands.clients.recorded import reported_workers
    from simulation.machine import MachineFileError
    from simulation.whatif.reported import reported_calibration as calibration_of

    workers = _give(lambda url, key: reported_workers(url, api_key=key), context, url, api_key)
    try:
        return calibration_of(url, workers)
    except MachineFileError as error:
        raise typer.Exit(fail(str(error), EXIT_BAD_INPUT)) from error


@clients.command(cls=Command)
def chaos(
    context: typer.Context,
    scenario: Annotated[Path, typer.Option(help="YAML file of the scenario; deploy/chaos/ has examples.")],
    url: Url = DEFAULT_URL,
    api_key: AdminKey = "",
    report: Annotated[
        Path | None, typer.Option("--report", "--json", help="Also write the report to this file, as JSON.")
    ] = None,
) -> None:
    """Inject faults into a running cluster under load, and check that no answer is lost or wrong."""
    import httpx

    from cluster.chaos.scenario import ScenarioError
    from cluster.client import cluster_url, explain
    from cluster.commands.clients.chaos import chaos as run
    from cluster.config.own_admin_key import with_own_key

    stop_on_signals()
    url, api_key = with_own_key(cluster_url(url), api_key, is_for_orders=is_for_orders(context))
    try:
        is_well = run(url, scenario, Console(), api_key=api_key, json_file=report)
    except ScenarioError as error:
        raise typer.Exit(fail(str(error), EXIT_BAD_INPUT)) from error
    except httpx.HTTPError as error:
        raise typer.Exit(fail(explain(error, url), EXIT_FAILURE)) from error
    raise typer.Exit(0 if is_well else EXIT_FAILURE)


@clients.command(cls=Command)
def chat(
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Talk to the model of a running cluster."""
    import httpx

    from cluster.client import cluster_url, explain
    from cluster.commands.clients.chat import ChatInputError
    from cluster.commands.clients.chat import chat as run

    stop_on_signals()
    url = cluster_url(url)
    try:
        run(url, Console(), api_key=api_key)
    except ChatInputError as error:
        raise typer.Exit(fail(str(error), EXIT_BAD_INPUT)) from error
    except httpx.HTTPError as error:
        raise typer.Exit(fail(explain(error, url), EXIT_FAILURE)) from error
