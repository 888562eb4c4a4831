"""A Ray that requires a token: the error messages if ours is not accepted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from cluster.deploy import ray_token
from cluster.deploy.ray_home import RayUnavailableError, connect
from cluster.deploy.ray_token import TokenRefusedError, check_token

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_K8S_TOKEN_AUTH", "RAY_ADDRESS")


class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    """The part of Ray's head that tells its cluster's id, with or without a token."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = grpc.StatusCode.UNAUTHENTICATED
        self.num_calls = 0
        self.address = ""

    def GetClusterId(self, request: Any, context: Any) -> Any:  # noqa: N802  # the name is Ray's
        """Answer, or refuse."""
        self.num_calls += 1
        if self.code is not None:
            context.abort(self.code, "InvalidAuthToken")
        return gcs_service_pb2.GetClusterIdReply()


@pytest.fixture
def head() -> Iterator[Head]:
    server, head = grpc.server(ThreadPoolExecutor(1)), Head()
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(head, server)
    head.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield head
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray_token, "create_gcs_channel", grpc.insecure_channel)  # Ray keeps the first token it reads
    return tmp_path


def test_token_that_is_not_taken_is_named_by_its_file_after_one_try(
    head: Head, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = own_home / "other"
    file.write_text("1" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))

    with pytest.raises(RayUnavailableError) as caught:
        connect(head.address)

    assert str(caught.value).startswith(
        f"the Ray at {head.address} did not accept the token in {file}: copy the token of the head"
    )
    assert head.num_calls == 1


def test_token_of_the_environment_is_named_by_its_variable(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)

    with pytest.raises(
        TokenRefusedError, match="did not accept the token in RAY_AUTH_TOKEN: copy the token of the head"
    ):
        check_token(head.address)


@pytest.mark.parametrize(
    ("mode", "told"), [("disabled", "RAY_AUTH_MODE is disabled here: unset it"), ("", "none is set here")]
)
def test_token_that_is_not_shown_is_asked_for(
    head: Head, monkeypatch: pytest.MonkeyPatch, mode: str, told: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)

    with pytest.raises(TokenRefusedError, match=f"requires a token, and {told}"):
        check_token(head.address)


def test_token_that_is_not_there_is_told_without_asking(
    head: Head, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")

    with pytest.raises(TokenRefusedError, match=f"there is no token in {own_home}/.ray/auth_token"):
        check_token(head.address)

    assert head.num_calls == 0


@pytest.mark.parametrize("code", [None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED])
def test_ray_that_refuses_no_token_is_connected_to(head: Head, code: grpc.StatusCode | None) -> None:
    head.code = code

    check_token(head.address)

    assert head.num_calls == 1
