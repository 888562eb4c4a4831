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
"""Ray puts sockets into a folder in it (``RAY_FOLDER``), whose paths may have 107 characters. HAProxy's may have 97, of
which Serve takes 58 for a folder of each proxy's own, and one is left for the name.
"""

OTHER_CLUSTERS = ("RAY_AUTH_TOKEN_PATH", "RAY_REDIS_ADDRESS")
"""Variables with which another Ray's token and state would be a private one's."""

FOLDER_PREFIX = "baton-"
HELD = "held"
"""A file of the session's folder that the command locks as long as it lives."""

LEFT_OVER_S = 86_400.0
"""What is left of a cluster that was killed stays for so long: somebody may want its logs."""

RAY_FOLDER = "r"
"""Ray's own folder, in that of the session: Ray lets everybody write there."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message between replicas: a prompt of a million token ids has about 5 MB; gRPC's default is 4 MB."""


HTTP_CALLBACK = "cluster.deploy.http_middlewares:middlewares"
"""What Serve calls in each process before it starts an HTTP server there."""


def serve_environment() -> dict[str, str]:
    """What every node of a cluster should set before its Ray starts: Serve's throughput mode, room for messages, no
    graceful end for a replica that fails its health checks (it would be waited for as long as for a drain), proxies
    that are looked after each second (one that died is replaced after three looks, by default ten seconds apart, and
    one that starts slowly is given a minute, by default 15 s), a controller that looks at everything four times a
    second instead of ten (2 % of a core less at rest), processes that count what they do every two seconds instead of
    ten times in one, processes as important as any (Ray lets all others of a machine go before them, those that read
    requests too; engines' threads stand back by themselves), and middleware in front of Serve's HTTP servers.

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
    """What the machines of a cluster set: ``serve_environment``, and a proxy on every machine that runs something.

    Throughput mode turns Serve's direct ingress on, with which only the head has a proxy and every router opens a port
    of its own.
    """
    return {**serve_environment(), "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def proxy_environment(config: BatonConfig) -> dict[str, str]:
    """How much the proxies of a private Ray hold: of headers what a router would, of bodies what all together would."""
    settings, security = config.router_settings(), config.security_settings()
    return {
        "BATON_PROXY_MAX_BODY_BYTES": str(settings.max_body_bytes),
        "BATON_PROXY_MAX_READING_BYTES": str(settings.max_reading_bytes * config.router_replicas),
        "BATON_PROXY_READING_WAIT_S": str(settings.reading_wait_s),
        "BATON_PROXY_MAX_NUM_HEADERS": str(security.max_num_headers),
        "BATON_PROXY_MAX_HEADER_BYTES": str(security.max_header_bytes),
        "BATON_PROXY_HEADER_TIMEOUT_S": str(security.header_timeout_s),
        "BATON_PROXY_MAX_CONNECTIONS": str(security.max_connections * config.router_replicas),
    }


def private_ray_environment(folder: Path) -> dict[str, str]:
    """What keeps a private Ray to this machine and to this user, with files in ``folder``.

    Ray's servers listen on the loopback address only (the variable's name tells where Ray does that by default). They
    ask for a certificate and a token that only this Ray's processes have, and so do Serve's servers between replicas,
    which listen on all interfaces whatever is asked for. What would answer without either is not started: metrics
    of Ray's processes, and a port for every router (what else Ray would start: ``cluster.deploy.patient_start``). UCX,
    which moves the KV, opens no port at all; where ``kv_transfer.transport`` is ``network`` it is held to the loopback
    device. Of what its one node has, the raylet tells once a second instead of ten times.
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
    """What makes Serve run HAProxy, with its files in ``folder`` and on ports of its own, so that two can coexist.

    HAProxy's statistics and metrics listen on all interfaces without authentication: not a default.
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
    """What lets a driver in where Ray's own command line would be let in.

    `ray start` asks for a token as soon as its user has one, and drivers send it only if this variable says so. A Ray
    that asks for none takes a driver that sends one.
    """
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))
    return {"RAY_AUTH_MODE": "token"} if has_token or ray_token_file().is_file() else {}


def ray_token_file() -> Path:
    """Where Ray keeps a user's token."""
    return Path.home() / ".ray" / "auth_token"


def check_token_file() -> None:
    """Refuse to use a token that others can read: it lets them run code as whoever started the Ray.

    Raises:
        PreflightError: They can.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or ray_token_file())
    mode = mode_open_to_others(path)
    if mode is not None:
        raise PreflightError(
            f"other users can read or write Ray's token in {path} (mode {mode:04o}), and run code with it on every "
            f"machine of the cluster: chmod 600 {path}; if others were on this machine meanwhile, make a new token "
            "(docs/operations.md)"
        )


def prepare_environment(config: BatonConfig, folder: Path | None) -> None:
    """Set what Ray and Serve will read. Call it before importing Ray.

    ``folder`` is for the files of a private Ray, None where an existing Ray is used. What tunes Serve may be set
    already and stays; what protects a private Ray is set whatever is there.

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
    """A new folder for the files of a private Ray, None where an existing one is used. Without logs it goes at the end.

    Nobody else may enter it: Ray lets everybody into its own folder, so that lies within.
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
            if not (folder / RAY_FOLDER).exists():  # else its logs are wanted, as was decided where Ray was stopped
                shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(parent: Path, *, now_s: float | None = None) -> None:
    """Remove this user's folders of clusters that were killed a day ago or before: nobody holds them any more.

    Those of clusters that failed, whose logs are wanted, have no file to hold.
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
