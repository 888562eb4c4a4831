"""The Serve graph: routers in front of one pool of workers per role."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from ray import serve

from cluster.config.config import BatonConfig
from cluster.config.names import ROUTER
from cluster.config.scaling import ScalingSection
from cluster.config.served_model import ServedModel
from cluster.plan.placement import SMALL_CPU_SHARE, Placement
from cluster.serve.addressed_router import AddressedRouter
from cluster.serve.autoscale import autoscaling_config
from cluster.serve.ingress import IngressSettings, RouterIngress
from cluster.serve.listener import ListenSettings
from cluster.serve.workers import Worker, WorkerSettings
from engine.contract.role import Role
from router.api.http.bounded_protocol import HttpLimits
from router.security import SecuritySettings

UNLIMITED_CALLS = 1_000_000
"""Serve's limit on concurrent calls to one replica. Our own limits are lower, and answer 429 instead of queueing."""

SHUTDOWN_MARGIN_S = 5.0
"""Additional time that a worker may need to end after its drain."""

SHUTDOWN_POLL_S = 0.2
MAX_START_ATTEMPTS = 3

QUIET_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
"""Serve would log every request, and every call between replicas. They are counted instead (docs/metrics.md). The level
is set as well, because otherwise Serve still formats the line of each call and then drops it.
"""

FULL_SURGE_PERCENT = 100

PACKAGES = ("cluster", "prefill", "decode", "kv_transfer", "router", "engine")


def build_graph(
    config: BatonConfig,
    model: ServedModel,
    placement: Placement,
    *,
    worker: type[Any] = Worker,
    own_admin_key: str | None = None,
) -> serve.Application:
    """Bind the deployments of the routers and of every role's workers. Another ``worker`` is for measuring routers.

    ``own_admin_key`` is the hash of the key for orders if no admin key is configured; without any key, orders are
    refused.

    The version of a deployment is a digest of its settings and of our code. On an update, deployments with the same
    version keep their replicas. The others get new replicas one by one; if there is room, the new replica starts first.
    """
    security, router = config.settings_of_routers(own_admin_key)
    settings = IngressSettings(
        model_dir=model.path,
        model_name=model.name,
        model_aliases=model.aliases,
        router=router,
        security=security,
        listen=_listen_settings(config, security),
        tracing=config.tracing_settings(),
    )
    ingress = serve.deployment(
        name=ROUTER,
        num_replicas=placement.counts[ROUTER],
        max_ongoing_requests=UNLIMITED_CALLS,
        graceful_shutdown_timeout_s=config.health.drain_timeout_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=config.health.check_period_s,
        health_check_timeout_s=config.health.check_timeout_s,
        ray_actor_options={"num_cpus": SMALL_CPU_SHARE},
        max_constructor_retry_count=MAX_START_ATTEMPTS,
        max_surge_percent=FULL_SURGE_PERCENT,
        logging_config=QUIET_LOGGING,
    )(RouterIngress)
    if config.router_per_node:
        ingress = ingress.options(max_replicas_per_node=1, max_surge_percent=0)
    return _versioned(ingress, (settings, config.pools)).bind(  # routers reach only the pools that they are bound to
        settings, **{name: _bind_worker(worker, config.role(name), config, model, placement) for name in config.pools}
    )


def _listen_settings(config: BatonConfig, security: SecuritySettings) -> ListenSettings | None:
    """The address on which routers listen; None if a proxy listens for them."""
    if not config.routers_listen:
        return None
    return ListenSettings(
        host=config.host,
        port=config.port,
        drain_timeout_s=config.health.drain_timeout_s,
        limits=HttpLimits.of(security, config.router_settings()),
    )


def _bind_worker(
    worker: type[Any], role: Role, config: BatonConfig, model: ServedModel, placement: Placement
) -> serve.Application:
    pool = role.name
    share = placement.shares[pool]
    settings = WorkerSettings(
        role=role,
        pools=config.pools,
        engine=share.apply(config.engine_config(pool, model=model.path, num_threads=share.num_threads)),
        transfer=config.transfer_options(),
        model_name=model.name,
        report_period_s=config.router_settings().report_period_s,
        step_timeout_s=config.health.step_timeout_s,
        drain_timeout_s=config.health.drain_timeout_s,
        scaling=config.pool(pool).scaling,
        core_sharing=config.core_sharing(pool),
        tracing=config.tracing_settings(),
    )
    # The number of threads depends on what else runs on the machine, so a change must not replace running workers.
    threadless = dataclasses.replace(settings.engine.model, num_threads=config.pool(pool).num_threads)
    stable = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, model=threadless))
    num_replicas = placement.counts[pool]
    deployment = serve.deployment(
        name=pool,
        **_size(settings.scaling, num_replicas),
        max_ongoing_requests=UNLIMITED_CALLS,
        graceful_shutdown_timeout_s=config.health.drain_timeout_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=config.health.check_period_s,
        health_check_timeout_s=config.health.check_timeout_s,
        request_router_config={"request_router_class": AddressedRouter},
        ray_actor_options={"num_cpus": share.num_cpus, "num_gpus": share.num_gpus, "resources": dict(share.resources)},
        max_constructor_retry_count=MAX_START_ATTEMPTS,
        **_spread(config.pool(pool).max_per_node),
        max_surge_percent=_one_of(num_replicas) if placement.room[pool] else 0,
        logging_config=QUIET_LOGGING,
    )(worker)
    return _versioned(deployment, stable).bind(settings)


def _size(scaling: ScalingSection | None, num_replicas: int) -> dict[str, Any]:
    """Serve's options for the size of a pool: fixed, or following the load."""
    if scaling is None:
        return {"num_replicas": num_replicas}
    return {"autoscaling_config": autoscaling_config(scaling, num_replicas=num_replicas)}


def _spread(max_per_node: int | None) -> dict[str, Any]:
    """Serve's option for the maximum number of replicas per machine, if one is set."""
    return {} if max_per_node is None else {"max_replicas_per_node": max_per_node}


def _versioned(deployment: serve.Deployment, settings: object) -> serve.Deployment:
    return deployment.options(version=deployment_version(settings), _internal=True)


def _one_of(num_replicas: int) -> int:
    """The percentage that stands for one replica."""
    return -(-100 // num_replicas)


def deployment_version(settings: object) -> str:
    """A digest of settings (nested dataclasses) and of our code. Replicas with an equal digest need no restart."""
    return hashlib.sha256(f"{code_digest()} {settings!r}".encode()).hexdigest()[:16]


@functools.cache
def code_digest() -> str:
    """A digest of all our modules, so that an upgrade replaces replicas that run the old code."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.relative_to(folder).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
