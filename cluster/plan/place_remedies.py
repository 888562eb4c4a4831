"""Remedies for a process that fits on no machine: changes of the configuration, or more resources."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence

from cluster.config.config import BatonConfig
from cluster.config.names import ROUTER
from cluster.config.pool import MAX_PER_NODE
from cluster.plan.change import Change, Key
from cluster.plan.inventory import Node
from cluster.plan.placement import SMALL_CPU_SHARE, Placed, Placement, first_replicas

LITTLE = 0.001
"""Amount of a custom resource that keeps workers on machines that offer it, without limiting their number."""


def place_changes(
    placed: Placed, placement: Placement, config: BatonConfig, nodes: Sequence[Node]
) -> Iterator[Iterator[Change]]:
    """Groups of changes. Of each group, the first one that helps is suggested."""
    yield _fewer_of_it(placed, placement, config)
    yield from (_fewer_of_pool(config, pool) for pool in config.pools if pool != placed.deployment)
    if placed.deployment == ROUTER and config.router_per_node:
        yield iter([Change.of((("router_per_node",), False))])
    if placed.deployment == ROUTER:
        yield _room_for_routers(config)
    for pool in config.pools:
        if placed.deployment in (pool, ROUTER):
            yield _more_per_node(config, pool)
            yield _less_of_resources(config, pool, nodes)
        yield _less_of_amounts(config, pool, nodes)


def fewer(config: BatonConfig, pool: str, count: int) -> Change:
    """Start with ``count`` workers, by whichever key sets that number."""
    replicas: Key = (f"{pool}_replicas",)
    given = config.num_replicas(pool)
    scaling = config.pool(pool).scaling
    if scaling is None or scaling.min_replicas <= count:
        return Change.of((replicas, count))
    bound: Key = (pool, "scaling", "min_replicas")
    return Change.of((bound, count), *(((replicas, count),) if given > count else ()))


def _fewer_of_it(placed: Placed, placement: Placement, config: BatonConfig) -> Iterator[Change]:
    """Only as many processes as fit on the machines."""
    count = sum(item.node is not None for item in placement.placed if item.deployment == placed.deployment)
    if count == 0:
        return
    if placed.deployment != ROUTER:
        yield fewer(config, placed.deployment, count)
    elif not config.router_per_node:
        yield Change.of((("router_replicas",), count))


def _fewer_of_pool(config: BatonConfig, pool: str) -> Iterator[Change]:
    for count in range(first_replicas(config, pool) - 1, 0, -1):
        yield fewer(config, pool, count)


def _more_per_node(config: BatonConfig, pool: str) -> Iterator[Change]:
    limit = config.pool(pool).max_per_node
    if limit is not None:
        for more in range(limit + 1, min(first_replicas(config, pool), MAX_PER_NODE) + 1):
            yield Change.of(((pool, "max_per_node"), more))


def _less_of_amounts(config: BatonConfig, pool: str, nodes: Sequence[Node]) -> Iterator[Change]:
    """Lower amounts reserved by a pool's workers: all that the largest machine has, even parts of it, the default."""
    section = config.pool(pool)
    for name, asked, most in (
        ("num_cpus", section.num_cpus, max((node.num_cpus for node in nodes), default=0.0)),
        ("num_gpus", section.num_gpus, max((node.num_gpus for node in nodes), default=0.0)),
    ):
        if asked is None:
            continue
        for parts in range(1, first_replicas(config, pool) + 2):
            if 0 < _rounded_down(most / parts) < asked:
                yield Change.of(((pool, name), _rounded_down(most / parts)))
        yield Change.of(((pool, name), None))


def _room_for_routers(config: BatonConfig) -> Iterator[Change]:
    """Every worker reserves less, by the CPUs of one or more routers."""
    asked = {pool: config.pool(pool).num_cpus for pool in config.pools}
    for left in (SMALL_CPU_SHARE, 0.5, 1.0):
        keys = [((pool, "num_cpus"), _rounded_down(cpus - left)) for pool, cpus in asked.items() if cpus is not None]
        if keys and all(amount > 0 for _, amount in keys):
            yield Change.of(*keys)
    if any(cpus is not None for cpus in asked.values()):
        yield Change.of(*(((pool, "num_cpus"), None) for pool, cpus in asked.items() if cpus is not None))


def _rounded_down(amount: float) -> float:
    """Rounded down to two decimals, and to none for whole numbers."""
    rounded = math.floor(amount * 100 + 1e-6) / 100
    return int(rounded) if rounded.is_integer() else rounded


def _less_of_resources(config: BatonConfig, pool: str, nodes: Sequence[Node]) -> Iterator[Change]:
    """Custom resources: lower amounts if machines offer less, or the similar name that machines do offer."""
    asked = config.pool(pool).resources
    too_much = [name for name, amount in asked.items() if amount > LITTLE and _offer(nodes, name)]
    for name in too_much:
        yield Change.of(((pool, "resources", name), LITTLE))
    for name, amount in asked.items():
        if not _offer(nodes, name):
            known = sorted({other for node in nodes for other in node.resources})
            for nearest in difflib.get_close_matches(name, known, n=1):
                others = {other: value for other, value in asked.items() if other != name}
                yield Change.of(((pool, "resources"), {**others, nearest: amount}))


def _offer(nodes: Sequence[Node], name: str) -> float:
    return max((node.offers.get(name, 0.0) for node in nodes), default=0.0)


def describe_lack(placed: Placed, nodes: Sequence[Node]) -> str:
    """Why a process fits on no machine: what it needs, and what the machines offer of that."""
    takes = {name: amount for name, amount in placed.demands.items() if amount > 0}
    never = {name: amount for name, amount in takes.items() if _offer(nodes, name) < amount}
    what = f"{placed.deployment} replica {placed.number} fits on no machine: it takes {describe(takes)}"
    num_able = len(_able(takes, nodes))
    if never:
        return f"{what}, and no machine offers {describe(never)}"
    if num_able == 0:
        return f"{what}, and no machine offers all of that at once"
    if placed.at_most is not None and placed.number > placed.at_most * num_able:
        return f"{what}, {num_able} machines offer that, and each may have {placed.at_most} at most"
    offered = {name: sum(node.offers.get(name, 0.0) for node in nodes) for name in takes}
    who = f"the {len(nodes)} machines together offer" if len(nodes) > 1 else "the one machine offers"
    return f"{what}, and {who} {describe(offered)}"


def machine_remedy(placed: Placed, nodes: Sequence[Node], *, count: int) -> str:
    """What the machines would need to have so that ``count`` processes of this deployment fit."""
    takes = {name: amount for name, amount in placed.demands.items() if amount > 0}
    if _able(takes, nodes):
        return "add machines"
    booked = {name: amount for name, amount in takes.items() if name in ("CPU", "GPU")}
    custom = {name: _whole(amount * count) for name, amount in takes.items() if name not in booked}
    if not custom or not _able(booked, nodes):
        return f"add machines that offer {describe(takes)} each"
    return f"start Ray on the machines meant for it with --resources='{json.dumps(custom)}'"


def _able(takes: Mapping[str, float], nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if all(node.offers.get(name, 0.0) >= amount for name, amount in takes.items())]


def _whole(amount: float) -> int:
    return max(1, math.ceil(amount - 1e-9))


def describe(amounts: Mapping[str, float]) -> str:
    """Resources as people read them."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
