"""The ``import_path`` of a Serve configuration file, for `serve deploy` and for RayService on Kubernetes.

`baton deploy` does more: it refuses what cannot work before anything changes, and rolls a failed update back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import serve

from cluster.config.config import BatonConfig
from cluster.config.config_file import ConfigFileError, config_of
from cluster.config.served_model import ServedModel, served_model
from cluster.deploy.claim import Claim
from cluster.deploy.deploy_record import forget_deployed, record_told
from cluster.deploy.ray_home import list_nodes
from cluster.deploy.serve_status import running_pools
from cluster.plan.inventory import nodes_of_ray
from cluster.plan.placement import Placement, RunningPool
from cluster.plan.plan import make_plan
from cluster.plan.preflight import preflight
from cluster.serve.graph import build_graph
from engine.contract.errors import ConfigError

POLL_PERIOD_S = 1.0
SERVE_HAS = ("host", "port")
ANY_HOST = "0.0.0.0"

ListNodes = Callable[[], Sequence[Mapping[str, Any]]]
AskRunning = Callable[[], Mapping[str, RunningPool]]

logger = logging.getLogger(f"baton.{__name__}")


# The annotation is a plain mapping: annotations are text in this module, and Serve could not resolve a class.
def build(args: dict[str, Any]) -> serve.Application:
    """The application of a configuration; ``args`` are the keys of a baton.yaml.

    Raises:
        ConfigFileError, ConfigError, CheckpointError, PreflightError: It cannot be built; Serve shows the message.
    """
    built = application(args, list_nodes, running=running_pools)
    _record(_config_of(args))
    return built


def _record(config: BatonConfig) -> None:
    """Record what runs, for a later `baton deploy`. Serve itself accepts any application, whatever ran before."""
    model = served_model(config)
    job_id = ray.get_runtime_context().get_job_id()
    claim = Claim.of_this_process("serve deploy", what=model.name, job_id=job_id)
    forget_deployed()
    record_told(config, claim, model_digest=model.digest(), is_taken=True)


def application(
    args: Mapping[str, Any],
    nodes: ListNodes,
    *,
    running: AskRunning = dict,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> serve.Application:
    """Wait for enough machines among those that ``nodes`` lists, and build the application for them.

    Serve is told what to run as soon as the head node is up: on Kubernetes, before any other pod has joined. Pools that
    follow their load keep the number of workers that ``running`` reports.
    """
    config = _config_of(args)
    model = preflight(config)
    deadline_s = clock() + config.startup_timeout_s
    last_lack = ""
    while True:
        placement, lack = _place(config, model, nodes(), running())
        if placement is not None:
            return build_graph(config, model, placement)
        if clock() > deadline_s:
            raise ConfigError(f"{lack} (after {config.startup_timeout_s:g} s)")
        if lack != last_lack:
            logger.info("waiting for machines: %s", lack)
            last_lack = lack
        pause(POLL_PERIOD_S)


def _config_of(args: Mapping[str, Any]) -> BatonConfig:
    """The configuration. It counts as open to the network: Serve listens, and its address is not known here."""
    for key in SERVE_HAS:
        if key in args:
            raise ConfigFileError(
                f"args: {key} is {args[key]!r}, but it is Serve that listens: set it in the file's http_options"
            )
    return config_of({**args, "address": "auto", "host": ANY_HOST}, where="args")


def _place(
    config: BatonConfig, model: ServedModel, records: Sequence[Mapping[str, Any]], running: Mapping[str, RunningPool]
) -> tuple[Placement | None, str]:
    """The placement; or None, and a text that says what is missing and another machine may bring.

    Raises:
        ConfigError: No further machine would help.
    """
    try:
        plan = make_plan(config, model, nodes_of_ray(records), running=running)
    except ConfigError as error:  # no GPU is there yet
        return None, str(error)
    problems = "; ".join(plan.problems)
    if plan.placement.homeless():
        return None, problems
    if problems:
        raise ConfigError(problems)
    return plan.placement, ""
