"""What a Serve configuration file names as ``import_path``: for `serve deploy`, and for RayService on Kubernetes.

`baton deploy` does more: it refuses what cannot work before anything changes, and takes a failed update back.
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


# A plain mapping: Serve would not know the class behind an annotation, which is text in this module.
def build(args: dict[str, Any]) -> serve.Application:
    """The application of a configuration; ``args`` are the keys of a baton.yaml.

    Raises:
        ConfigFileError, ConfigError, CheckpointError, PreflightError: It cannot be; Serve shows the message.
    """
    built = application(args, list_nodes, running=running_pools)
    _record(_config_of(args))
    return built


def _record(config: BatonConfig) -> None:
    """Let `baton deploy`, which may come later, know what runs. Serve takes what it is given, whatever ran before."""
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
    """The application on the machines that ``nodes`` lists, once they are there: Serve is told what to run as soon as
    the head is, on Kubernetes before any other pod has joined it. Pools that follow their load go on with as many
    workers as those that ``running`` tells of have.
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
    """The configuration; open to the network as far as we know: what listens there is Serve's, and not ours to see."""
    for key in SERVE_HAS:
        if key in args:
            raise ConfigFileError(f"args: {key} is {args[key]!r}, but Serve listens: set it in the file's http_options")
    return config_of({**args, "address": "auto", "host": ANY_HOST}, where="args")


def _place(
    config: BatonConfig, model: ServedModel, records: Sequence[Mapping[str, Any]], running: Mapping[str, RunningPool]
) -> tuple[Placement | None, str]:
    """Where everything goes; or None, and what is lacking that another machine may bring.

    Raises:
        ConfigError: No machine would help.
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
