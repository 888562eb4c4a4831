"""The application that Serve builds from a configuration file of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from cluster.config.config_file import ConfigFileError
from cluster.config.names import ROUTER
from cluster.serve_app import application, build
from engine.contract.errors import ConfigError

DEPLOY = Path(__file__).parents[3] / "deploy"
HEAD = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"memory": float(8 << 30)}}


def machine(number: int, **resources: float) -> dict[str, Any]:
    everything = {"CPU": 16.0, "GPU": 1.0, "memory": float(64 << 30), **resources}
    return {"Alive": True, "NodeManagerAddress": f"10.0.0.{number}", "Resources": everything}


class Machines:
    """Machines that join one by one, and the time that passes meanwhile."""

    def __init__(self, *records: Mapping[str, Any], period_s: float = 1.0) -> None:
        self._records = records
        self._counts: Iterator[int] = itertools.count(1)
        self._period_s = period_s
        self.now_s = 0.0

    def list(self) -> list[Mapping[str, Any]]:
        """The machines that have joined by now: one more at each call."""
        return list(self._records[: next(self._counts)])

    def pause(self, _seconds: float) -> None:
        """Let time pass."""
        self.now_s += self._period_s

    def build(self, args: Mapping[str, Any]) -> serve.Application:
        """The application, once they suffice."""
        return application(args, self.list, clock=lambda: self.now_s, pause=self.pause)


def test_serve_calls_the_builder_with_the_keys_of_a_file() -> None:
    with pytest.raises(ConfigFileError, match="did you mean 'prefill_replicas'"):
        call_user_app_builder_with_args_if_necessary(build, {"prefil_replicas": 2})


def test_sample_serve_config_becomes_an_application() -> None:
    (declared,) = yaml.safe_load((DEPLOY / "serve-config.yaml").read_text())["applications"]

    built = Machines(machine(1)).build(declared["args"])

    assert built._bound_deployment.name == ROUTER


def test_kubernetes_application_waits_for_the_pods_that_join_after_the_head() -> None:
    service = yaml.safe_load((DEPLOY / "kubernetes" / "rayservice.yaml").read_text())
    (declared,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    machines = Machines(
        HEAD, *(machine(number, **{pool: 1.0}) for number in (2, 3) for pool in ("baton_prefill", "baton_decode"))
    )

    built = machines.build({**declared["args"], "model": None})

    assert built._bound_deployment.name == ROUTER
    assert machines.now_s == 4.0, "there were four machines to wait for"


def test_machines_that_never_come_are_named() -> None:
    machines = Machines(HEAD, machine(2), period_s=100)

    with pytest.raises(ConfigError, match=r"no machine offers 0.5 special.*after 300 s"):
        machines.build({"startup_timeout_s": 300, "decode": {"resources": {"special": 0.5}}})


def test_what_no_machine_could_mend_is_refused_at_once() -> None:
    machines = Machines(machine(1))

    with pytest.raises(ConfigError, match="num_blocks = 1"):
        machines.build({"cache": {"num_blocks": 1}})

    assert machines.now_s == 0


@pytest.mark.parametrize(("key", "value"), [("host", "0.0.0.0"), ("port", 8000)])
def test_where_serve_listens_is_not_among_the_arguments(key: str, value: object) -> None:
    with pytest.raises(ConfigFileError, match=f"args: {key} is {value!r}, .*http_options"):
        Machines(machine(1)).build({key: value})


@pytest.mark.parametrize(("security", "is_open"), [({}, False), ({"admin_keys": [f"sha256:{'0' * 64}"]}, True)])
def test_orders_to_workers_are_taken_only_with_keys_since_serve_may_listen_anywhere(
    security: dict[str, object], is_open: bool
) -> None:
    built = Machines(machine(1)).build({"security": security})

    settings = built._bound_deployment.init_args[0]
    assert settings.router.admin_api is is_open
