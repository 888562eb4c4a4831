"""The Ray on which a cluster runs: a private one for one `baton serve` on this machine, or a shared one."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME, NAMESPACE, RAYLET
from cluster.config.served_model import served_model
from cluster.deploy.claim import SERVE, Claim, ClaimedError, give_back, take_claim
from cluster.deploy.deploy_record import forget_deployed, read_deploy_record
from cluster.deploy.fork_server.fork_server import ForkServer
from cluster.deploy.patient_start import NotStartedError, patient_ray, start_patiently
from cluster.deploy.ray_address import KEEPS_TO_ITSELF, NOBODY_ANSWERS, check_reachable
from cluster.deploy.ray_token import TokenRefusedError, check_token
from cluster.deploy.serve_env import RAY_FOLDER, ray_token_file
from cluster.deploy.serve_status import applications, delete_application
from cluster.deploy.started_processes import TERMINATE_TIMEOUT_S, StartedProcesses, is_named, is_worker, kill_all
from cluster.plan.placement import logical_cpus, usable_cores, wanted_resources
from engine.device.core_table import remove_left_over


class RayUnavailableError(Exception):
    """The requested Ray cannot be used."""


class RayHome(Protocol):
    """A Ray to deploy to."""

    def start(self) -> Claim | None:
        """Connect, and start what is needed. Returns the claim on a shared Ray; None on a private one."""

    def is_alive(self) -> bool:
        """True while a cluster on it can serve."""

    def is_there(self) -> bool:
        """True while this Ray may answer, with or without a cluster on it. Any thread may ask."""

    def kill(self) -> None:
        """End all started processes immediately, for a caller that is about to end. Any thread may call it."""

    def stop(self) -> None:
        """End everything that was started. Idempotent."""

    def remove_logs(self) -> None:
        """Remove the log files, if they are ours. Call it after ``stop``."""

    @property
    def logs(self) -> str:
        """Where to look when something failed."""


class PrivateRay:
    """Starts Ray's processes, and makes sure that all of them end.

    ``cluster.deploy.serve_env`` must be applied before Ray is imported, since Ray's processes inherit the environment.
    Its workers are forks of ``fork_server``, if there is one.
    """

    def __init__(
        self,
        *,
        folder: Path,
        num_cpus: int,
        object_store_bytes: int,
        resources: Mapping[str, float],
        fork_server: ForkServer | None = None,
    ) -> None:
        self._folder = folder
        self._worker_command = fork_server.command_for if fork_server is not None else str
        self._num_cpus = num_cpus
        self._resources = dict(resources)
        self._object_store_bytes = object_store_bytes
        self._started: StartedProcesses | None = None

    @property
    def logs(self) -> str:
        """The folder that holds the logs of every process."""
        return str(self._folder / RAY_FOLDER / "session_latest" / "logs")

    def start(self) -> None:
        """Start the processes and connect to them.

        Failed starts are retried (``cluster.deploy.patient_start``).

        Raises:
            RayUnavailableError: Ray did not start.
        """
        self._started = StartedProcesses()
        try:
            with patient_ray(self._folder, worker_command=self._worker_command):
                start_patiently(self._start, self.stop, folder=self._folder)
        except NotStartedError as error:
            raise RayUnavailableError(
                f"Ray did not start on this machine, {error} Try again when this machine is less busy."
            ) from error

    def _start(self) -> None:
        ray.init(
            address="local",
            num_cpus=self._num_cpus,
            resources=self._resources,
            object_store_memory=self._object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace=NAMESPACE,
            _temp_dir=str(self._folder / RAY_FOLDER),
        )

    def is_alive(self) -> bool:
        """True while the driver is connected, Ray's own processes run, and Ray still counts its only machine as alive,
        which it stops doing when the raylet no longer answers."""
        node = _own_node()
        if not ray.is_initialized() or node is None or node.dead_processes():
            return False
        try:
            return any(node["Alive"] for node in list_nodes())
        except (RayError, OSError, RuntimeError):  # too busy to answer; dead processes were checked above
            return True

    def is_there(self) -> bool:
        """As ``is_alive``."""
        return self.is_alive()

    def kill(self) -> None:
        """Kill all processes that ``stop`` would end. The raylet is last: some Ray calls end this driver without it."""
        kill_all([process for process in self._processes() if not is_named(process, RAYLET)])
        remove_left_over()
        kill_all(self._processes())

    def stop(self) -> None:
        """End every process that came with Ray: ask Ray's own to end, then kill what is left.

        A raylet that ends kills its workers, but not forks: these would end by themselves, a second later.
        """
        own = [process for process in self._processes() if not is_worker(process)]
        _set_global_client(None)  # type: ignore[no-untyped-call]  # the client of a Serve that ends, so that the next start gets a new one
        ray.shutdown()
        psutil.wait_procs(own, timeout=TERMINATE_TIMEOUT_S)
        kill_all(self._processes())
        remove_left_over()

    def _processes(self) -> list[psutil.Process]:
        return self._started() if self._started is not None else []

    def remove_logs(self) -> None:
        """Remove the whole folder, including sockets."""
        shutil.rmtree(self._folder, ignore_errors=True)


class SharedRay:
    """A Ray that existed before and stays: only what we started is ended. ``what`` describes it to other users."""

    def __init__(self, *, address: str, host: str, port: int, what: str) -> None:
        self._address = address
        self._host = host
        self._port = port
        self._what = what
        self._held: HeldClaim | None = None
        self._is_serve_ours = False
        self._is_app_ours = False

    @property
    def logs(self) -> str:
        """A text that says where Ray keeps logs: on its nodes."""
        return "`ray logs` on the Ray cluster"

    def start(self) -> Claim:
        """Connect and claim the cluster. From here on an application of our name is ours.

        Raises:
            RayUnavailableError: There is no Ray at the address, a cluster runs or is being started on it, or its Serve
                listens elsewhere.
        """
        connect(self._address)
        self._held = hold(SERVE, what=self._what, address=self._address)
        if is_occupied(self._address):
            told = read_deploy_record().told
            raise RayUnavailableError(
                f"the Ray at {self._address} already runs a Baton cluster{f', {told.claim}' if told else ''}: end it "
                f"with `baton shutdown --address {self._address}`, or name another Ray with --address"
            )
        check_http(address=self._address, host=self._host, port=self._port)
        forget_deployed()
        self._is_serve_ours = _get_global_client(raise_if_no_controller_running=False) is None
        self._is_app_ours = True
        return self._held.claim

    def is_alive(self) -> bool:
        """True while the driver is connected and Serve knows the application."""
        if not ray.is_initialized():
            return False
        known = applications()
        return known is None or APP_NAME in known

    def is_there(self) -> bool:
        """True while the driver is connected."""
        return ray.is_initialized()

    def kill(self) -> None:
        """Do nothing: the Ray is not ours."""

    def stop(self) -> None:
        """Delete our application, and shut Serve down if we started it and no other application uses it."""
        if not ray.is_initialized():
            return
        names = set(applications() or ()) if self._is_app_ours else set()
        if self._is_serve_ours and not names - {APP_NAME}:
            serve.shutdown()  # type: ignore[no-untyped-call]
        elif APP_NAME in names:
            delete_application()
        if self._is_app_ours:
            forget_deployed()
        if self._held is not None:
            self._held.give_back()
        ray.shutdown()

    def remove_logs(self) -> None:
        """Leave Ray's logs where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClaim:
    """A claim that this process holds."""

    claim: Claim
    number: int

    def give_back(self) -> None:
        """Give up the claim. If Ray is gone, the claim is gone too."""
        with contextlib.suppress(RayError):
            give_back(self.number)


def hold(command: str, *, what: str, address: str) -> HeldClaim:
    """Claim the cluster of the Ray that we are connected to.

    Raises:
        RayUnavailableError: Another command holds the claim.
    """
    claim = Claim.of_this_process(command, what=what, job_id=ray.get_runtime_context().get_job_id())
    try:
        return HeldClaim(claim=claim, number=take_claim(claim, living_jobs))
    except ClaimedError as error:
        if error.holder.command == SERVE:
            state = "already runs a Baton cluster"
            remedy = f"stop it first, there (pid {error.holder.pid}) or with `baton shutdown --address {address}`"
        else:
            state = "is being deployed to"
            remedy = f"wait until that has ended, or stop it there (pid {error.holder.pid})"
        raise RayUnavailableError(
            f"the Ray at {address} {state}: {error.holder}: {remedy}, or name another Ray with --address"
        ) from error


def living_jobs() -> set[str]:
    """The ids of the drivers that are connected to Ray."""
    jobs: list[Mapping[str, Any]] = ray._private.state.jobs()  # type: ignore[no-untyped-call]
    return {str(job["JobID"]) for job in jobs if not job["IsDead"]}


def is_deployed(address: str) -> bool:
    """True when Serve knows our application, even if the application is being deleted.

    Raises:
        RayUnavailableError: Serve cannot say.
    """
    return _application(address) is not None


def is_occupied(address: str) -> bool:
    """True when our application exists.

    Raises:
        RayUnavailableError: The application is being deleted, or Serve cannot say.
    """
    application = _application(address)
    if application is not None and application.status == ApplicationStatus.DELETING:
        raise RayUnavailableError(
            f"the previous cluster on the Ray at {address} is still being removed and finishes its requests "
            "(health.drain_timeout_s): try again when it is gone"
        )
    return application is not None


def _application(address: str) -> ApplicationStatusOverview | None:
    known = applications()
    if known is None:
        raise RayUnavailableError(f"Serve's controller on the Ray at {address} is restarting: try again in a moment")
    return known.get(APP_NAME)


def connect(address: str) -> None:
    """Connect to the Ray at ``address`` as a driver.

    Raises:
        RayUnavailableError: There is no Ray, or it refuses the connection.
    """
    try:
        check_token(address)
        check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE)
    except TokenRefusedError as error:
        raise RayUnavailableError(str(error)) from error
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        what = f"{error}: {error.__cause__}" if error.__cause__ is not None else str(error)
        raise RayUnavailableError(f"cannot use the Ray at {address}: {what} ({remedy_of(what)})") from error


def remedy_of(what: str) -> str:
    """What the user can do about an error of Ray's while connecting."""
    known = {
        "Version mismatch": "use the versions of Python and Ray of that cluster, for example on its head after "
        "`. ~/baton/deploy/node.sh`",
        "No node info found": "this machine is not part of that cluster: run this on one that is, such as its head",
        KEEPS_TO_ITSELF: "that command ends it, on Ctrl-C; --address takes a Ray that `ray start` started",
        NOBODY_ANSWERS: "start a Ray, or name another with --address",
        "Could not find any running Ray": "no Ray runs on this machine: start one, or name another with --address",
    }
    return next((remedy for words, remedy in known.items() if words in what), authentication_hint())


def list_nodes() -> list[Mapping[str, Any]]:
    """Ray's records of all machines, alive or dead, for ``cluster.plan.inventory``."""
    nodes: list[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def check_http(*, address: str, host: str, port: int) -> None:
    """Compare host and port with those of a Serve that already runs, since it cannot change them.

    Raises:
        RayUnavailableError: Serve listens on another host or port.
    """
    client: Any = _get_global_client(raise_if_no_controller_running=False)
    if client is not None and (client.http_config.host, client.http_config.port) != (host, port):
        raise RayUnavailableError(
            f"Serve already runs on the Ray at {address} and listens on "
            f"{client.http_config.host}:{client.http_config.port}: set host and port to these values"
        )


def authentication_hint() -> str:
    """What the user can check when a Ray listens, but refuses the connection."""
    mode = os.environ.get("RAY_AUTH_MODE", "unset")
    return (
        f"RAY_AUTH_MODE is {mode} here; a Ray that requires a token needs RAY_AUTH_MODE=token, and its token in "
        f"RAY_AUTH_TOKEN or {ray_token_file()}"
    )


def home_of(config: BatonConfig, folder: Path | None, fork_server: ForkServer | None) -> RayHome:
    """The Ray that a configuration asks for; ``folder`` and ``fork_server`` are for a private one."""
    if config.address is not None:
        return SharedRay(
            address=config.address, host=config.host, port=config.port, what=served_model(config).at(config)
        )
    assert folder is not None
    return PrivateRay(
        folder=folder,
        num_cpus=logical_cpus(config, num_cores=usable_cores()),
        object_store_bytes=config.object_store_bytes,
        resources=wanted_resources(config),
        fork_server=fork_server,
    )


def _own_node() -> Any:
    """Ray's record of the Ray processes that this process started; None if it started none."""
    return ray._private.worker._global_node
