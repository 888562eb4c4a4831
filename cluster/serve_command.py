"""`baton serve`: from a checked configuration to a cluster that answers, and back to nothing.

Imports Ray and Serve, which read their environment at that moment: apply ``cluster.serve_env`` first.
"""

from __future__ import annotations

import json
import time

from rich.console import Console

from cluster.config import LOOPBACK_HOSTS, BatonConfig
from cluster.deployment import Deployment, RefusedStartError, StartError
from cluster.ray_home import RayHome, RayUnavailableError
from cluster.readiness import url_of, wait_until_ready
from cluster.served_model import ServedModel
from cluster.signals import Stopped, ignoring_signals, stop_on_signals
from cluster.start_display import StartDisplay
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
        _introduce(config, model, console)
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


def base_url(config: BatonConfig) -> str:
    """Where a client on this machine reaches the API."""
    return url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host), config.port)


def _introduce(config: BatonConfig, model: ServedModel, console: Console) -> None:
    """Print the URL, and a command that proves it."""
    url = base_url(config)
    body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": "Hello!"}]})
    pools = f"{config.prefill_replicas} prefill, {config.decode_replicas} decode, {config.router_replicas} router"
    has_keys = bool(config.security_settings().loaded().api_keys)
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if has_keys else ""
    lines = [
        f"Serving {model.name} on {url} ({pools}). Press Ctrl-C to stop.",
        "Try it:",
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    ]
    if config.host not in LOOPBACK_HOSTS and not has_keys:
        lines.insert(1, f"Anyone who can reach {config.host}:{config.port} may use it: no keys are configured.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
