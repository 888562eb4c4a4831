"""Metrics as plain data, which routers exchange, and one of them renders for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.versions import across_versions


class Distribution:
    """A histogram: counts of values up to each bound, and their sum. Cheap enough for every token: one bisection."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        """Add a value, once or several times."""
        self._counts[bisect_left(self._bounds, value)] += num_times
        self.total += value * num_times

    @property
    def num_values(self) -> int:
        """Number of values."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Each bound as Prometheus writes it, with the number of values up to it; the last is ``+Inf``."""
        names = [*(_bound_text(bound) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


def _bound_text(bound: float) -> str:
    return str(float(bound))


Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[tuple[str, str], ...]


class MetricRow(NamedTuple):
    """One number of a family. ``suffix`` is what follows the family's name: ``_total``, ``_bucket``, ``_sum``, ...

    Its three fields must not change, because routers of another version read them by position.
    """

    suffix: str
    labels: Labels
    value: float


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """All rows of one name."""

    name: str
    kind: Kind
    text: str
    rows: tuple[MetricRow, ...]

    def labelled(self, **labels: str) -> MetricFamily:
        """The same rows with more labels."""
        more = tuple(labels.items())
        return MetricFamily(
            name=self.name,
            kind=self.kind,
            text=self.text,
            rows=tuple(MetricRow(row.suffix, row.labels + more, row.value) for row in self.rows),
        )


def counter(name: str, text: str, values: Mapping[Labels, float]) -> MetricFamily:
    """A family of counters, which only grow."""
    rows = tuple(MetricRow("_total", labels, value) for labels, value in values.items())
    return MetricFamily(name=name, kind="counter", text=text, rows=rows)


def gauge(name: str, text: str, values: Mapping[Labels, float]) -> MetricFamily:
    """A family of current values."""
    rows = tuple(MetricRow("", labels, value) for labels, value in values.items())
    return MetricFamily(name=name, kind="gauge", text=text, rows=rows)


def histogram(name: str, text: str, distribution: Distribution) -> MetricFamily:
    """The buckets of a distribution."""
    buckets = [MetricRow("_bucket", (("le", bound),), count) for bound, count in distribution.cumulative()]
    rows = (*buckets, MetricRow("_count", (), buckets[-1].value), MetricRow("_sum", (), distribution.total))
    return MetricFamily(name=name, kind="histogram", text=text, rows=rows)


def render(families: Iterable[MetricFamily]) -> bytes:
    """The text that Prometheus reads. Families of the same name are merged, as the format requires."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    text: bytes = generate_latest(registry)
    return text


class _Families(Collector):
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families as prometheus_client's metrics."""
        metrics: dict[str, Metric] = {}
        for family in self._families:
            metric = metrics.setdefault(family.name, Metric(family.name, family.text, family.kind))
            metric.samples.extend(Sample(family.name + row.suffix, dict(row.labels), row.value) for row in family.rows)
        yield from metrics.values()
