"""Checks with one call, before Ray connects, whether a shared Ray accepts our token.

Ray itself tries twenty times, writes each refusal to the terminal, and then raises its own traceback as a text.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray._private.gcs_utils import create_gcs_channel
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from cluster.deploy.serve_env import ray_token_file

_messages: Any = gcs_service_pb2
_stub_of: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub

TIMEOUT_S = 5.0
"""Timeout of this call. If Ray is too busy to answer it, Ray's own timeouts for connecting apply."""


class TokenRefusedError(Exception):
    """A Ray refused our token, or would refuse it; the message says what to do."""


def check_token(address: str) -> None:
    """Check our token with the Ray at ``address``. If that Ray cannot be asked, nothing is raised here.

    Raises:
        TokenRefusedError: There is no token, or it is not accepted.
    """
    if _has_mode("token") and (missing := _missing_token()):
        raise TokenRefusedError(f"the Ray at {address}: RAY_AUTH_MODE is token here, but {missing}: {_remedy()}")
    if _is_refused(address):
        raise TokenRefusedError(f"the Ray at {address} {_refusal()}")


def _has_mode(mode: str) -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == mode


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or ray_token_file())


def _missing_token() -> str:
    """The message about a missing token; empty if there is a token, or if Kubernetes provides it."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH", "0") not in ("", "0", "false"):
        return ""
    path = _token_file()
    try:
        return "" if path.read_text().strip() else f"{path} is empty"
    except OSError as error:
        return f"there is no token in {path} ({error.strerror})"
    except UnicodeDecodeError:
        return f"{path} is not a text file"


def _refusal() -> str:
    if not _has_mode("token"):
        mode = os.environ.get("RAY_AUTH_MODE")
        without = f"RAY_AUTH_MODE is {mode} here: unset it, and" if mode else "none is set here:"
        return f"requires a token, and {without} {_remedy()}"
    place = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else _token_file()
    return f"did not accept the token in {place}: {_remedy()}"


def _remedy() -> str:
    return f"copy the token of the head to {_token_file()}, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


def _is_refused(address: str) -> bool:
    try:
        found = canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
    except (ConnectionError, ValueError):
        return False
    channel: Any = create_gcs_channel(found)
    with contextlib.closing(channel):
        try:
            _stub_of(channel).GetClusterId(_messages.GetClusterIdRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False
