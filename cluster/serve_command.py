"""`baton serve`: from a checked configuration to a cluster that answers, and back to nothing.

Imports Ray and Serve, which read their environment at that moment: apply ``cluster.serve_env`` first.
"""

from __future__ import annotations

import time

from rich.console import Console

from cluster.api_url import base_url
from cluster.config import BatonConfig
from cluster.deployment import Deployment, RefusedStartError, StartError
from cluster.ray_home import RayHome, RayUnavailableError
from cluster.readiness import wait_until_ready
from cluster.served_model import ServedModel
from cluster.signals import Stopped, ignoring_signals, stop_on_signals
from cluster.start_display import StartDisplay
from cluster.welcome import welcome
from engine.errors import ConfigError

WATCH_PERIOD_S = 1.0


def serve(config: BatonConfig, model: ServedModel, home: RayHome, console: Console) -> int:
    """Start a cluster, serve until a signal, stop everything. Returns the exit code.

    Raises:
        RefusedStartError, RayUnavailableError, ConfigError: Bad input; nothing is left running.
        StartError: It could not start, or ended by itself; nothing is left running but logs.
    """
    is_serving = False
    keep_logs = True
    try:
        with StartDisplay(console) as display:
            _start(config, model, home, display)
        is_serving = True
        console.print(welcome(config, model, logs=home.logs), markup=False, highlight=False, soft_wrap=True)
        while home.is_alive():
            time.sleep(WATCH_PERIOD_S)
        raise StartError(f"the cluster ended by itself; see {home.logs}")
    except Stopped as stopped:
        keep_logs = False
        return 0 if is_serving else stopped.exit_code
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


def _start(config: BatonConfig, model: ServedModel, home: RayHome, display: StartDisplay) -> None:
    display.stage("starting Ray")
    claim = home.start()
    # Ray installs a handler for SIGTERM that exits at once.
    stop_on_signals()
    display.stage("starting Ray Serve")
    Deployment(config=config, model=model, claim=claim).start(display.workers)
    display.stage("waiting until the router sees the workers")
    wait_until_ready(base_url(config))
