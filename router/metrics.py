"""What Prometheus gets: this router's own measurements, and the workers' as last reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.pool import ReplicaPool
from router.replica import Replica

_LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)

_GAUGES: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
    ("baton:kv_cache_usage_ratio", "Share of the KV blocks in use.", lambda item: item.load.kv_usage),
    ("baton:num_requests_running", "Requests that compute.", lambda item: item.load.num_running),
    ("baton:num_requests_waiting", "Requests that wait.", lambda item: item.load.num_waiting),
    ("baton:num_requests_loading", "Requests whose KV is on its way.", lambda item: item.load.num_loading),
    ("baton:num_leased_blocks", "KV blocks pinned for a reader.", lambda item: item.load.num_leased_blocks),
    ("baton:queued_prefill_tokens", "Prompt tokens that wait.", lambda item: item.load.queued_prefill_tokens),
    ("baton:replica_up", "1 when the replica takes requests.", lambda item: float(item.is_in_service)),
)

_DEPARTED = "departed"
"""Stands for all replicas that are gone, so that the sum over a role never falls."""


class _WorkerCollector(Collector):
    """Reads the pools when Prometheus asks; nothing is copied while serving."""

    def __init__(self, pools: Iterable[ReplicaPool]) -> None:
        self._pools = tuple(pools)

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of every replica."""
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=("role", "replica"))
            for role, replica in self._replicas():
                gauge.add_metric((role, replica.replica_id), read(replica))
            yield gauge
        departed = {pool.role: pool.counters.departed() for pool in self._pools}
        living = {name for _, replica in self._replicas() for name in replica.load.counters}
        names = sorted(living.union(*departed.values()))
        for name in names:
            counter = CounterMetricFamily(f"baton:worker_{name}", f"The workers' {name}.", labels=("role", "replica"))
            for role, replica in self._replicas():
                if name in replica.load.counters:
                    counter.add_metric((role, replica.replica_id), replica.load.counters[name])
            for role, sums in departed.items():
                if name in sums:
                    counter.add_metric((role, _DEPARTED), sums[name])
            yield counter

    def _replicas(self) -> Iterator[tuple[str, Replica]]:
        for pool in self._pools:
            for replica in pool.replicas:
                yield pool.role, replica


class _Labelled(Collector):
    """All metrics of a registry, with the label ``router`` on every sample."""

    def __init__(self, registry: CollectorRegistry, router_id: str) -> None:
        self._registry = registry
        self._router_id = router_id

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "router": self._router_id}) for sample in metric.samples
            ]
            yield metric


class RouterMetrics:
    """This router's measurements, in a registry of its own, each with the label ``router``; the workers' have none.

    Behind one address each scrape may reach another router: without the label their counters would be mixed.
    """

    def __init__(self, pools: Iterable[ReplicaPool] = (), *, router_id: str = "") -> None:
        self.registry = CollectorRegistry()
        self._router_id = router_id
        self._workers = CollectorRegistry()
        self._workers.register(_WorkerCollector(pools))
        registry = self.registry
        self._requests = Counter("baton:http_requests", "HTTP requests by answer.", ("path", "code"), registry=registry)
        self._finishes = Counter(
            "baton:request_finishes", "Sequences by how they ended.", ("reason",), registry=registry
        )
        self.prompt_tokens = Counter("baton:prompt_tokens", "Prompt tokens of answered requests.", registry=registry)
        self.generation_tokens = Counter("baton:generation_tokens", "Tokens generated.", registry=registry)
        self._ttft = Histogram(
            "baton:time_to_first_token_seconds",
            "From acceptance to the first token.",
            buckets=_LONG_S,
            registry=registry,
        )
        self._itl = Histogram(
            "baton:inter_token_latency_seconds", "Between tokens of a sequence.", buckets=_SHORT_S, registry=registry
        )
        self._e2e = Histogram(
            "baton:e2e_request_latency_seconds", "From acceptance to the finish.", buckets=_LONG_S, registry=registry
        )
        self._finish_children = {
            reason: self._finishes.labels(reason) for reason in ("stop", "length", "error", "abort")
        }

    def watch(self, *, in_progress: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read these numbers whenever Prometheus asks."""
        for name, text, read in (
            ("baton:router_requests_in_progress", "Sequences accepted and not ended.", in_progress),
            ("baton:router_requests_waiting", "Sequences that wait for room on a decode replica.", waiting),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A sequence's first token came."""
        self._ttft.observe(seconds)
        self.prompt_tokens.inc(num_prompt_tokens)

    def more_tokens(self, seconds_per_token: float) -> None:
        """More tokens came."""
        self._itl.observe(seconds_per_token)

    def ended(self, reason: str, seconds: float) -> None:
        """A sequence ended with ``stop`` or ``length``, with an ``error``, or its client left: ``abort``."""
        self._finish_children[reason].inc()
        if reason in ("stop", "length"):
            self._e2e.observe(seconds)

    def answered(self, path: str, code: int) -> None:
        """An HTTP request was answered."""
        self._requests.labels(path, str(code)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        ours = CollectorRegistry(auto_describe=False)
        ours.register(_Labelled(self.registry, self._router_id))
        text: bytes = generate_latest(ours) + generate_latest(self._workers)
        return text
