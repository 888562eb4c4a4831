"""Another user of this machine, who tries to read and write what belongs to a cluster.

``python -m tests.support.cluster.stranger UID`` takes a ``Target`` as JSON on standard input and prints what was
possible, one line each, as a JSON list. It starts as root and drops everything at once, so that it needs no right to
the code.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import http.client
import importlib
import json
import os
import pkgutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import ray.core.generated
import ray.serve.generated.serve_pb2

TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 240.0
SHM_RDONLY = 0o10000

HTTP_PATHS = (
    *("/", "/metrics", "/status", "/api/version", "/api/healthz", "/api/local_raylet_healthz", "/api/job_agent/jobs/"),
    *("/-/routes", "/-/healthz", "/v1/models", "/docs", "/logs", "/nodes", "/api/serve/applications/"),
)
POST_PATHS = ("/admin/drain", "/admin/faults", "/get_or_create_runtime_env", "/api/job_agent/jobs/")

HTTP2_BEGINS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

ASKS_FOR_CERTIFICATE = "asks for a certificate"

MORE_METHODS = (
    *(f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull", "FreeObjects")),
    *("/ray.rpc.syncer.RaySyncer/StartSync", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
"""Methods that Ray's servers may offer although its Python package does not describe them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What belongs to a cluster."""

    paths: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    sysv_segments: tuple[int, ...] = ()
    abstract_sockets: tuple[str, ...] = ()
    ports: Mapping[str, str] = field(default_factory=dict)
    """The TCP ports on which it listens, and the address to reach each at."""


def findings_of(target: Target, *, uid: int) -> list[str]:
    """What a user with that id, without groups, can do to a cluster."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.cluster.stranger", str(uid)],
        input=json.dumps(dataclasses.asdict(target)),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    findings: list[str] = json.loads(result.stdout)
    return findings


def files(paths: tuple[str, ...]) -> Iterator[str]:
    """Paths that can be read, written, connected to, or moved away."""
    for path in paths:
        for flags, verb in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write")):
            if _works(lambda path=path, flags=flags: os.close(os.open(path, flags | os.O_NONBLOCK))):
                yield f"{verb} {path}"
        if _works(lambda path=path: os.rename(path, f"{path}.moved")):
            os.rename(f"{path}.moved", path)
            yield f"move {path}"
        with socket.socket(socket.AF_UNIX) as client:
            if _works(lambda path=path, client=client: client.connect(path)):
                yield f"connect {path}"


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def processes(pids: tuple[int, ...]) -> Iterator[str]:
    """What the kernel reveals about processes, and whether they can be signalled."""
    for pid in pids:
        for name in ("environ", "maps", "mem", "fd", "cwd"):
            path = f"/proc/{pid}/{name}"
            if _works(lambda path=path: os.listdir(path) if path.endswith(("fd", "cwd")) else Path(path).read_bytes()):
                yield f"read {path}"
        if _works(lambda pid=pid: os.kill(pid, 0)):
            yield f"signal process {pid}"


def segments(ids: tuple[int, ...]) -> Iterator[str]:
    """Segments of System V shared memory that can be attached to."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    for segment in ids:
        for flags, verb in ((SHM_RDONLY, "read"), (0, "write")):
            if libc.shmat(segment, None, flags) != ctypes.c_void_p(-1).value:
                yield f"{verb} shared memory segment {segment}"
            elif ctypes.get_errno() != errno.EACCES:
                yield f"shared memory segment {segment}: {os.strerror(ctypes.get_errno())}"


def abstract(names: tuple[str, ...]) -> Iterator[str]:
    """Abstract sockets that accept a connection and do not close it immediately.

    Anybody may send a datagram to one that takes those: it gets a few.
    """
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(TIMEOUT_S)
            if _works(lambda client=client, name=name: client.connect("\0" + name)) and not _hangs_up(client):
                yield f"connect abstract socket {name}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            for size in (0, 1, 8, 1000):
                _works(lambda client=client, name=name, size=size: client.sendto(b"\xff" * size, "\0" + name))


def _hangs_up(client: socket.socket) -> bool:
    """True if the other side closes the connection although nothing was sent."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def ports(addresses: Mapping[str, str]) -> Iterator[str]:
    """What TCP ports answer without a token, key or certificate: over HTTP, gRPC, or in any other way."""
    for port, address in addresses.items():
        kind = kind_of(address, int(port))
        if kind == "http":
            yield from http_answers(address, int(port))
        elif kind == "grpc":
            yield from grpc_answers(address, int(port))
        elif kind != ASKS_FOR_CERTIFICATE:
            yield f"port {port}: {kind}"


def kind_of(address: str, port: int) -> str:
    """The protocol of a port. HTTP/2, on which gRPC is based, begins with a SETTINGS frame from the server."""
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT_S) as client:
            client.sendall(HTTP2_BEGINS)
            answer = client.recv(16)
        if not answer:
            return answer_over_tls(address, port)
    except TimeoutError:
        return "takes a connection and says nothing"
    except OSError as error:
        return f"closed: {error.strerror}"
    if answer.startswith((b"HTTP/1", b"<")):
        return "http"
    return "grpc" if answer[3:4] == b"\4" else f"says {answer!r}"


def answer_over_tls(address: str, port: int, *, certificate: Path | None = None, key: Path | None = None) -> str:
    """What a port that closed the connection answers over TLS, with or without a client certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    try:
        with (
            socket.create_connection((address, port), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain) as client,
        ):
            client.sendall(HTTP2_BEGINS)
            answer = client.recv(16)
    except ssl.SSLError as error:
        return ASKS_FOR_CERTIFICATE if "CERTIFICATE_REQUIRED" in str(error) else f"hangs up: {error}"
    except ConnectionError:
        return ASKS_FOR_CERTIFICATE
    return f"says {answer!r} over TLS" if answer else ASKS_FOR_CERTIFICATE


def http_answers(address: str, port: int) -> Iterator[str]:
    """HTTP requests that are not refused; unknown paths count as refused."""
    for method, path in (*(("GET", path) for path in HTTP_PATHS), *(("POST", path) for path in POST_PATHS)):
        client = http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)
        try:
            body = b"{}" if method == "POST" else None
            client.request(method, path, body=body, headers={"Content-Type": "application/json"})
            status = client.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            yield f"port {port}: {method} {path}: {type(error).__name__}"
            continue
        finally:
            client.close()
        if status not in (401, 403, 404, 405):
            yield f"port {port}: {method} {path}: {status}"


def grpc_answers(address: str, port: int) -> Iterator[str]:
    """gRPC calls that are not refused for lack of a token; unknown methods count as refused."""
    refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        for method in methods():
            call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
            try:
                call(b"", timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() not in refused:
                    yield f"port {port}: {method}: {error.code().name}"
            else:
                yield f"port {port}: {method}: OK"


def methods() -> list[str]:
    """Every method that Ray and Serve describe, and some more."""
    names = [f"ray.core.generated.{item.name}" for item in pkgutil.iter_modules(ray.core.generated.__path__)]
    modules: list[Any] = [importlib.import_module(name) for name in names if name.endswith("_pb2")]
    services = [
        service
        for module in (*modules, ray.serve.generated.serve_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    described = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    return [*described, *MORE_METHODS]


def main() -> None:
    """Become the other user, and try everything."""
    uid = int(sys.argv[1])
    known = methods()  # all code is loaded while it may be read
    assert known
    values = json.load(sys.stdin)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    findings = [
        *files(tuple(values["paths"])),
        *processes(tuple(values["processes"])),
        *segments(tuple(values["sysv_segments"])),
        *abstract(tuple(values["abstract_sockets"])),
        *ports(values["ports"]),
    ]
    print(json.dumps(findings))


if __name__ == "__main__":
    main()
