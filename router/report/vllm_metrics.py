"""Exports the metrics under the names of vLLM's server, for dashboards made for it.

Names and units are vLLM's; ``engine`` is the id of a worker, or of a router for what only routers see. Sums over
engines are right; metrics that vLLM has and Baton does not measure are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.contract.stats import WORKER_COUNTERS
from router.pool.replica import Replica
from router.pool.role_view import RoleReplicas
from router.report.metric_rows import Labels, MetricFamily, MetricRow, counter, gauge
from router.report.router_report import RouterReport

_ROUTER_NAMES = {
    "baton:prompt_tokens": ("prompt_tokens",),
    "baton:generation_tokens": ("generation_tokens",),
    "baton:request_finishes": ("request_success",),
    "baton:time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "baton:inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "baton:e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "baton:request_queue_time_seconds": ("request_queue_time_seconds",),
    "baton:request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "baton:request_decode_time_seconds": ("request_decode_time_seconds",),
    "baton:request_inference_time_seconds": ("request_inference_time_seconds",),
    "baton:request_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "baton:request_prompt_tokens": ("request_prompt_tokens",),
    "baton:request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "baton:request_params_max_tokens": ("request_params_max_tokens",),
}

_WORKER_COUNTERS = {name: told.vllm for name, told in WORKER_COUNTERS.items() if told.vllm}


def vllm_families(
    routers: Iterable[RouterReport], pools: Sequence[RoleReplicas], *, model_name: str
) -> list[MetricFamily]:
    """The metrics that vLLM's dashboards use and Baton measures."""
    families = [
        _as_vllm(family, name, model_name=model_name, engine=router.router_id)
        for router in routers
        for family in router.families
        for name in _ROUTER_NAMES.get(family.name, ())
    ]
    replicas = [replica for pool in pools for replica in pool.replicas]
    return [*families, *_gauges(replicas, model_name), *_counters(pools, model_name)]


def _as_vllm(family: MetricFamily, name: str, *, model_name: str, engine: str) -> MetricFamily:
    more = _labels(model_name, engine)
    rows = tuple(
        MetricRow(row.suffix, more + tuple((_label(key), value) for key, value in row.labels), row.value)
        for row in family.rows
    )
    return MetricFamily(name=f"vllm:{name}", kind=family.kind, text=family.text, rows=rows)


def _label(name: str) -> str:
    return "finished_reason" if name == "reason" else name


def _labels(model_name: str, engine: str) -> Labels:
    return (("model_name", model_name), ("engine", engine))


def _num_waiting(replica: Replica) -> float:
    return replica.load.num_waiting + replica.load.num_loading


_GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "num_requests_running": ("Running requests.", lambda item: item.load.num_running),
    "num_requests_waiting": ("Waiting requests, including those that wait for KV.", _num_waiting),
    "kv_cache_usage_perc": ("Share of the KV blocks in use, from 0 to 1.", lambda item: item.load.kv_usage),
    "gpu_cache_usage_perc": ("Older name of kv_cache_usage_perc.", lambda item: item.load.kv_usage),
}


def _gauges(replicas: Sequence[Replica], model_name: str) -> list[MetricFamily]:
    families = [
        gauge(
            f"vllm:{name}",
            text,
            {_labels(model_name, replica.replica_id): float(read(replica)) for replica in replicas},
        )
        for name, (text, read) in _GAUGES.items()
    ]
    config: dict[Labels, float] = {
        (
            *_labels(model_name, replica.replica_id),
            ("block_size", str(replica.info.block_size)),
            ("num_gpu_blocks", str(replica.info.num_blocks)),
        ): 1.0
        for replica in replicas
        if replica.info is not None
    }
    return [*families, gauge("vllm:cache_config_info", "The KV cache of each engine.", config)]


def _counters(pools: Sequence[RoleReplicas], model_name: str) -> list[MetricFamily]:
    families = []
    for key, name in _WORKER_COUNTERS.items():
        values: dict[Labels, float] = {
            _labels(model_name, replica_id): counters[key]
            for pool in pools
            for replica_id, counters in pool.counters.by_replica().items()
            if key in counters
        }
        families.append(counter(f"vllm:{name}", f"The engines' {key}.", values))
    return families
