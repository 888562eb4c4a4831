"""The Serve graph: routers in front of a prefill pool and a decode pool."""

from __future__ import annotations

from typing import Any

from ray import serve

from cluster.addressed_router import AddressedRouter
from cluster.config import BatonConfig, PoolName
from cluster.health import HealthSection
from cluster.ingress import IngressSettings, RouterIngress
from cluster.ingress_router import IngressRouter
from cluster.names import DECODE, PREFILL, ROUTER
from cluster.placement import SMALL_CPU_SHARE, Machine, share_out
from cluster.served_model import ServedModel
from cluster.workers import DecodeWorker, PrefillWorker, WorkerSettings

UNLIMITED_CALLS = 1_000_000
"""Calls in progress at one replica. Our own bounds are lower, and answer 429 and not with a silent queue."""

SHUTDOWN_MARGIN_S = 5.0
"""What a drained worker may need beyond its drain."""

SHUTDOWN_POLL_S = 0.2
MAX_START_ATTEMPTS = 3


def build_graph(
    config: BatonConfig,
    model: ServedModel,
    machine: Machine,
    *,
    workers: tuple[type[Any], type[Any]] = (PrefillWorker, DecodeWorker),
) -> serve.Application:
    """Bind the three deployments; other ``workers`` are for measuring the router alone.

    Raises:
        ConfigError: The machine does not have what the configuration asks for.
    """
    prefill = _worker_deployment(workers[0], PREFILL, config.prefill_replicas, config.health)
    decode = _worker_deployment(workers[1], DECODE, config.decode_replicas, config.health)
    ingress = serve.deployment(
        name=ROUTER,
        num_replicas=config.router_replicas,
        max_ongoing_requests=UNLIMITED_CALLS,
        graceful_shutdown_timeout_s=config.health.drain_timeout_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=config.health.check_period_s,
        health_check_timeout_s=config.health.check_timeout_s,
        ray_actor_options={"num_cpus": SMALL_CPU_SHARE},
        request_router_config={"request_router_class": IngressRouter},
        max_constructor_retry_count=MAX_START_ATTEMPTS,
    )(RouterIngress)
    return ingress.bind(
        _bind_worker(prefill, "prefill", config, model, machine),
        _bind_worker(decode, "decode", config, model, machine),
        IngressSettings(
            model_dir=model.path,
            model_name=model.name,
            router=config.router_settings(),
            security=config.security_settings().loaded(),
        ),
    )


def _worker_deployment(worker: type[Any], name: str, num_replicas: int, health: HealthSection) -> serve.Deployment:
    return serve.deployment(
        name=name,
        num_replicas=num_replicas,
        max_ongoing_requests=UNLIMITED_CALLS,
        graceful_shutdown_timeout_s=health.drain_timeout_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=health.check_period_s,
        health_check_timeout_s=health.check_timeout_s,
        request_router_config={"request_router_class": AddressedRouter},
        max_constructor_retry_count=MAX_START_ATTEMPTS,
    )(worker)


def _bind_worker(
    deployment: serve.Deployment, pool: PoolName, config: BatonConfig, model: ServedModel, machine: Machine
) -> serve.Application:
    share = share_out(config, pool, machine)
    settings = WorkerSettings(
        role=pool,
        engine=share.apply(config.engine_config(pool, model=model.path, num_threads=share.num_threads)),
        transfer=config.transfer_options(),
        model_name=model.name,
        report_period_s=config.router_settings().report_period_s,
        step_timeout_s=config.health.step_timeout_s,
        drain_timeout_s=config.health.drain_timeout_s,
    )
    actor_options = {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus}
    return deployment.options(ray_actor_options=actor_options).bind(settings)
