"""`baton serve`: from a checked configuration to a cluster that answers, and back to nothing.

Imports Ray and Serve, which read their environment at that moment: apply ``cluster.deploy.serve_env`` first.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console

from cluster.commands.ray_waits import RayEndedError, ending_waits
from cluster.commands.signals import Stopped, ignoring_signals, stop_on_signals
from cluster.commands.start_display import StartDisplay
from cluster.commands.welcome import welcome
from cluster.config.api_url import base_url
from cluster.config.config import BatonConfig
from cluster.config.own_admin_key import own_admin_key
from cluster.config.served_model import ServedModel
from cluster.deploy.claim import Claim
from cluster.deploy.deployment import Deployment, RefusedStartError, StartError
from cluster.deploy.ray_home import RayHome, RayUnavailableError, SharedRay
from cluster.deploy.readiness import wait_until_ready
from engine.contract.errors import ConfigError

WATCH_PERIOD_S = 1.0


def serve(config: BatonConfig, model: ServedModel, home: RayHome, console: Console) -> int:
    """Start a cluster, serve until a signal, stop everything. Returns the exit code.

    Raises:
        Stopped: A signal came before it served; nothing is left running.
        RefusedStartError, RayUnavailableError, ConfigError: Bad input; nothing is left running.
        StartError: It could not start, or ended by itself; only logs are left.
    """

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    is_serving = False
    keep_logs = True
    try:
        with ExitStack() as while_it_runs:
            with StartDisplay(console) as display:
                key_hash = while_it_runs.enter_context(own_admin_key(config, tell))
                deployment = Deployment(config=config, model=model, own_admin_key=key_hash)
                deployment = _come_up(deployment, home, display, tell)
            for warning in deployment.warnings():
                tell(f"warning: {warning}")
            is_serving = True
            tell(welcome(config, model, logs=home.logs))
            while home.is_alive():
                time.sleep(WATCH_PERIOD_S)
        raise StartError(f"the cluster stopped unexpectedly; see {home.logs}")
    except Stopped:
        keep_logs = False
        if is_serving:
            return 0
        raise
    except (RefusedStartError, RayUnavailableError, ConfigError):
        keep_logs = False
        raise
    except StartError as error:
        raise StartError(f"{error} (logs: {home.logs})") from error
    finally:
        with ignoring_signals():
            console.print("stopping", highlight=False)
            home.stop()
            if not keep_logs:
                home.remove_logs()


def _come_up(deployment: Deployment, home: RayHome, display: StartDisplay, tell: Callable[[str], None]) -> Deployment:
    """Start Ray and the cluster on it; once more if Ray ended during the start. Returns the deployment that serves."""
    for is_last in (False, True):
        deployment = dataclasses.replace(deployment, claim=_start_ray(home, display))
        try:
            with ending_waits(home):
                _start(deployment, display)
            return deployment
        except RayEndedError as error:
            what = "Ray stopped, or stopped answering, while the cluster started"
            if is_last:
                raise StartError(f"{what}, twice; the machine may be too busy, or have too little memory") from error
            tell(f"warning: {what}; starting it once more")
            home.stop()
    raise AssertionError("the last attempt returns or raises")


def _start_ray(home: RayHome, display: StartDisplay) -> Claim | None:
    display.stage("connecting to Ray" if isinstance(home, SharedRay) else "starting Ray")
    claim = home.start()
    # Ray installs a handler for SIGTERM that exits at once.
    stop_on_signals()
    return claim


def _start(deployment: Deployment, display: StartDisplay) -> None:
    display.stage("starting Ray Serve")
    deployment.start(display.workers)
    display.stage("waiting until the router is connected to the workers")
    wait_until_ready(base_url(deployment.config))
