"""How large pools that follow their load can become on the given machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.config.config import BatonConfig
from cluster.plan.change import Change, first_that_helps
from cluster.plan.inventory import Node
from cluster.plan.placement import Placement, RunningPool, most_replicas, place
from engine.contract.errors import ConfigError

KEYS = ("num_gpus", "num_cpus", "max_per_node")
"""Settings of a pool that may keep further workers of it off the machines."""


def growth_warnings(config: BatonConfig, nodes: Sequence[Node]) -> Iterator[str]:
    """Warnings about pools that cannot grow to their configured maximum, with remedies. Each pool is checked with the
    other one at its minimum, since pools may use the same machines at different times.

    These are only warnings, because Ray may add machines. There are none where a problem is already reported.
    """
    for pool in config.pools:
        most = most_replicas(config, pool)
        grown = _grown(config, pool, nodes)
        if config.pool(pool).scaling is None or grown.homeless() or grown.counts[pool] >= most:
            continue
        others = " and ".join(_workers(grown.counts[other], other) for other in config.pools if other != pool)
        where = f"the {len(nodes)} machines have" if len(nodes) > 1 else "the one machine has"
        remedies = [change.describe(config) for change in _changes(config, pool, grown.counts[pool], nodes)]
        yield (
            f"{pool}.scaling.max_replicas is {most}, but beside {others} {where} room for "
            f"{_workers(grown.counts[pool], pool)}: more would wait for a machine, forever if Ray's autoscaler "
            f"adds none; {', or '.join([*remedies, 'add machines'])}"
        )


def _grown(config: BatonConfig, pool: str, nodes: Sequence[Node]) -> Placement:
    """The placement with one pool at its maximum, and the other one at its minimum."""
    numbers = {**dict.fromkeys(config.pools, 0), pool: most_replicas(config, pool)}
    return place(config, nodes, running={name: RunningPool(num_replicas=number) for name, number in numbers.items()})


def _changes(config: BatonConfig, pool: str, num_fitting: int, nodes: Sequence[Node]) -> Iterator[Change]:
    """Changes after which a pool can grow to its maximum: a lower maximum, or leaving one of ``KEYS`` out."""
    yield Change.of(((pool, "scaling", "max_replicas"), num_fitting))

    def helps(changed: BatonConfig) -> bool:
        try:
            grown = _grown(changed, pool, nodes)
        except ConfigError:
            return False
        return not grown.homeless() and grown.counts[pool] >= most_replicas(changed, pool)

    for name in KEYS:
        given = [other for other in sorted(config.pools, key=lambda other: other != pool) if _has(config, other, name)]
        changes = [Change.of(((other, name), None)) for other in given]
        if len(given) > 1:
            changes.append(Change.of(*(((other, name), None) for other in config.pools)))
        found = first_that_helps(changes, config, helps)
        if found is not None:
            yield found


def _has(config: BatonConfig, pool: str, name: str) -> bool:
    return getattr(config.pool(pool), name) is not None


def _workers(count: int, pool: str) -> str:
    return f"{count} {pool} {'worker' if count == 1 else 'workers'}"
