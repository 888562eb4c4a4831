"""The environment in which Ray and Serve start. Most of it is read once, when Ray's processes start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config.config import BatonConfig
from cluster.config.private_files import mode_open_to_others
from cluster.deploy.ray_certificate import certificate_environment
from cluster.plan.preflight import PreflightError

MAX_FOLDER_CHARACTERS = 36
"""Limit for the path of the session's folder, because of sockets in it. Ray's sockets are in a subfolder
(``RAY_FOLDER``), and their paths may have 107 characters. HAProxy's may have 97: Serve uses 58 of them for a folder for
each proxy, and one is left for the name.
"""

OTHER_CLUSTERS = ("RAY_AUTH_TOKEN_PATH", "RAY_REDIS_ADDRESS")
"""Variables that would make a private Ray use another Ray's token and state."""

FOLDER_PREFIX = "baton-"
HELD = "held"
"""A file in the session's folder that the command keeps locked while it lives."""

LEFT_OVER_S = 86_400.0
"""How long the folder of a killed cluster is kept, because its logs may be needed."""

RAY_FOLDER = "r"
"""Ray's own folder, inside the session's folder, because Ray makes it writable for all users."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message between replicas: a prompt of a million token ids has about 5 MB; gRPC's default is 4 MB."""


HTTP_CALLBACK = "cluster.deploy.http_middlewares:middlewares"
"""The function that Serve calls in each process before it starts an HTTP server there."""


def serve_environment() -> dict[str, str]:
    """What every node of a cluster should set before its Ray starts:

    - Serve's throughput mode, larger messages between replicas, and middleware in front of Serve's HTTP servers.
    - No graceful end for a replica that fails its health checks: Serve would wait as long as for a drain.
    - Health checks of proxies every second instead of every ten: a dead one is replaced after three failed checks. A
      proxy that starts slowly gets a minute instead of 15 s.
    - A controller loop of 4 instead of 10 iterations a second: 2 % of a core less at rest.
    - Metrics exported every two seconds instead of ten times a second.
    - Normal priority: by default Ray gives all its workers, routers too, a lower priority than other processes.
      Engines lower that of their own threads.

    Measured on 2 cores, against Serve's defaults: 15,000 instead of 2,700 stream items a second from a handle, 6,100
    instead of 1,400 server-sent events a second to one HTTP client, 2.8 ms instead of 3.9 ms for a GET.
    """
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_MESSAGE_BYTES),
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": HTTP_CALLBACK,
    }


def node_environment() -> dict[str, str]:
    """What the machines of a cluster set: ``serve_environment``, and a proxy on every machine that runs replicas.

    Throughput mode turns Serve's direct ingress on. With it only the head node would have a proxy, and every router
    would open a port of its own.
    """
    return {**serve_environment(), "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def proxy_environment(config: BatonConfig) -> dict[str, str]:
    """The limits of a private Ray's proxies: for headers, those of one router; for bodies, those of all together."""
    settings, security = config.router_settings(), config.security_settings()
    return {
        "BATON_PROXY_MAX_BODY_BYTES": str(settings.max_body_bytes),
        "BATON_PROXY_MAX_READING_BYTES": str(settings.max_reading_bytes * config.router_replicas),
        "BATON_PROXY_READING_WAIT_S": str(settings.reading_wait_s),
        "BATON_PROXY_MAX_NUM_HEADERS": str(security.max_num_headers),
        "BATON_PROXY_MAX_HEADER_BYTES": str(security.max_header_bytes),
        "BATON_PROXY_HEADER_TIMEOUT_S": str(security.header_timeout_s),
        "BATON_PROXY_MAX_CONNECTIONS": str(security.max_connections * config.router_replicas),
        "BATON_PROXY_WRITE_TIMEOUT_S": str(settings.write_timeout_s),
        "BATON_PROXY_MIN_READ_BYTES_PER_S": str(settings.min_read_bytes_per_s),
    }


def private_ray_environment(folder: Path) -> dict[str, str]:
    """Keeps a private Ray closed to other machines and other users, with files in ``folder``.

    Ray's servers listen only on the loopback address (the first variable is named after the systems where that is the
    default). They require a certificate and a token that only this Ray's processes have. So do Serve's servers between
    replicas, which always listen on all interfaces. Servers that would answer without both are not started: metrics of
    Ray's processes, and a port for every router (for others see ``cluster.deploy.patient_start``). UCX, which moves the
    KV, opens no port; with ``kv_transfer.transport: network`` it is limited to the loopback device. The raylet reports
    its node's resources once a second instead of ten times.
    """
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_K8S_TOKEN_AUTH": "0",
        **certificate_environment(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_raylet_report_resources_period_milliseconds": "1000",
        "RAY_health_check_failure_threshold": "12",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "UCX_NET_DEVICES": "lo",
    }


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Makes Serve run HAProxy, with its files in ``folder`` and on its own ports, so that two clusters can coexist.

    This is not the default, because HAProxy's statistics and metrics listen on all interfaces without authentication.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    }


def shared_ray_environment() -> dict[str, str]:
    """Lets a driver connect wherever Ray's own command line could connect.

    `ray start` requires a token as soon as its user has one, but drivers only send it if this variable is set. A Ray
    that requires no token also accepts a driver that sends one.
    """
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))
    return {"RAY_AUTH_MODE": "token"} if has_token or ray_token_file().is_file() else {}


def ray_token_file() -> Path:
    """The file in which Ray keeps a user's token."""
    return Path.home() / ".ray" / "auth_token"


def check_token_file() -> None:
    """Refuse a token that other users can read: with it they can run code as the user who started the Ray.

    Raises:
        PreflightError: Other users can read the token.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or ray_token_file())
    mode = mode_open_to_others(path)
    if mode is not None:
        raise PreflightError(
            f"other users can read or write Ray's token in {path} (mode {mode:04o}), and run code with it on every "
            f"machine of the cluster: chmod 600 {path}; if others may have read it already, make a new token "
            "(docs/operations.md)"
        )


def prepare_environment(config: BatonConfig, folder: Path | None) -> None:
    """Set the environment variables that Ray and Serve will read. Call it before importing Ray.

    ``folder`` is for the files of a private Ray; None if an existing Ray is used. Variables that tune Serve keep a
    value that is already set. Variables that protect a private Ray are always overwritten.

    Raises:
        PreflightError: The token for an existing Ray can be read by others.
    """
    defaults = serve_environment()
    if folder is None:
        check_token_file()
        defaults.update(shared_ray_environment())
    else:
        for name in OTHER_CLUSTERS:
            os.environ.pop(name, None)
        os.environ.update(private_ray_environment(folder))
        os.environ.update(proxy_environment(config))
        if config.http_proxy == "haproxy":
            os.environ.update(haproxy_environment(folder))
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def session_folder(config: BatonConfig) -> Iterator[Path | None]:
    """A new folder for the files of a private Ray; None on an existing Ray. Without logs it is removed at the end.

    No other user may enter it. Ray makes its own folder accessible to all users, so that one is inside.
    """
    if config.address is not None:
        yield None
        return
    folder = make_session_folder()
    remove_left_over(folder.parent)
    held = folder / HELD
    with held.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            held.unlink(missing_ok=True)
            if not (folder / RAY_FOLDER).exists():  # it exists if the logs are to be kept, decided when Ray was stopped
                shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(parent: Path, *, now_s: float | None = None) -> None:
    """Remove this user's folders of clusters that were killed at least a day ago: no process locks them any more.

    The folders of clusters that failed, whose logs may be needed, have no lock file and stay.
    """
    latest_s = (time.time() if now_s is None else now_s) - LEFT_OVER_S
    for held in parent.glob(f"{FOLDER_PREFIX}*/{HELD}"):
        with contextlib.suppress(OSError), held.open("rb") as lock:
            about = os.fstat(lock.fileno())
            if about.st_uid != os.geteuid() or about.st_mtime > latest_s:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(held.parent, ignore_errors=True)


def make_session_folder() -> Path:
    """A new folder with a short name."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    if len(str(folder)) > MAX_FOLDER_CHARACTERS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    return folder


def free_port() -> int:
    """A TCP port of the loopback address that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
