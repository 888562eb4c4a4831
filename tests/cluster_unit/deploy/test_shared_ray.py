"""A Serve that ends or restarts while a command waits for a cluster on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.experimental.internal_kv import _initialize_internal_kv, _internal_kv_reset
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.config.served_model import served_model
from cluster.deploy.deployment import Deployment, TakenOffError
from cluster.deploy.ray_home import SharedRay
from cluster.deploy.serve_status import delete_application
from engine.contract.errors import ConfigError


class EmptyStore:
    """Ray's key-value store with nothing in it."""

    def internal_kv_keys(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        return []


@pytest.fixture
def store() -> Iterator[None]:
    _initialize_internal_kv(EmptyStore())
    yield
    _internal_kv_reset()


def gone() -> Any:
    raise ActorDiedError


def restarting() -> Any:
    raise ActorUnavailableError("the controller restarts", None)


def with_status(status: ApplicationStatus) -> Any:
    overview = ApplicationStatusOverview(status=status, message="", last_deployed_time_s=0, deployments={})
    return SimpleNamespace(applications={APP_NAME: overview})


def starting() -> Any:
    return with_status(ApplicationStatus.DEPLOYING)


def running() -> Any:
    return with_status(ApplicationStatus.RUNNING)


def empty() -> Any:
    return SimpleNamespace(applications={})


def deployment(**keys: Any) -> Deployment:
    config = BatonConfig.model_validate({"startup_timeout_s": 30, **keys})
    return Deployment(config=config, model=served_model(config))


def answer_in_turn(monkeypatch: pytest.MonkeyPatch, *answers: Callable[[], Any]) -> None:
    left = list(answers)
    monkeypatch.setattr(serve, "status", lambda: left.pop(0)())


@pytest.mark.parametrize("end", [gone, empty])
def test_cluster_that_is_taken_off_while_it_starts_is_not_waited_for(
    end: Callable[[], Any], store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_in_turn(monkeypatch, starting, end)

    with pytest.raises(TakenOffError, match="removed while it started"):
        deployment().wait(lambda reports, status: None)


def test_controller_that_restarts_meanwhile_is_waited_for(store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_in_turn(monkeypatch, starting, restarting, running)

    deployment().wait(lambda reports, status: None)


@pytest.mark.parametrize(("says", "is_alive"), [(gone, False), (empty, False), (restarting, True), (running, True)])
def test_cluster_lives_while_serve_has_it_or_cannot_say(
    says: Callable[[], Any], is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    answer_in_turn(monkeypatch, says)

    assert SharedRay(address="auto", host="127.0.0.1", port=8000, what="tiny").is_alive() is is_alive


def test_application_that_drains_for_longer_than_a_minute_is_left_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def delete(name: str) -> None:
        asked.append(name)
        raise TimeoutError("Some of these applications weren't deleted after 60s")

    monkeypatch.setattr(serve, "delete", delete)

    delete_application()

    assert asked == [APP_NAME]


def test_what_a_private_ray_can_never_place_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 4.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [machine])
    monkeypatch.setattr("ray.serve.context._connect", lambda raise_if_no_controller_running=True: None)
    keys = {"decode_replicas": 2, "decode": {"max_per_node": 1}}

    with pytest.raises(
        ConfigError, match=r"lower decode_replicas to 1, or raise decode\.max_per_node to 2, or use a Ray"
    ):
        deployment(**keys).place()
    assert len(deployment(**keys, address="auto").place().homeless()) == 1


@pytest.mark.parametrize("address", [None, "auto"])
def test_what_a_pool_cannot_become_on_the_machines_of_a_ray_is_told(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 4.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [machine])
    monkeypatch.setattr("ray.serve.context._connect", lambda raise_if_no_controller_running=True: None)
    keys = {"address": address, "kv_transfer": {"transport": "local"}}

    assert deployment(**keys, decode={"scaling": {"max_replicas": 3}}).warnings() == []
    (warning,) = deployment(**keys, decode={"max_per_node": 1, "scaling": {"max_replicas": 3}}).warnings()

    assert warning.startswith("decode.scaling.max_replicas is 3, but beside 1 prefill worker the one machine has room")
