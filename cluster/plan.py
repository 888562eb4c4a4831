"""What a deployment would look like: machines, places, and the memory of every engine. Starts and imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import BatonConfig, PoolName
from cluster.inventory import Node
from cluster.placement import POOLS, Placed, Placement, WorkerShare, num_workers_on, place
from cluster.served_model import ServedModel
from cluster.sizing import EngineSize, ModelSize, size_engine
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known before anything starts. ``problems`` are reasons not to start it."""

    nodes: tuple[Node, ...]
    model: ModelSize
    placement: Placement
    sizes: Mapping[PoolName, EngineSize]
    problems: tuple[str, ...]


def make_plan(config: BatonConfig, model: ServedModel, nodes: Sequence[Node], *, cpu_dtype: str = "") -> Plan:
    """Place everything and do the arithmetic of every engine. ``cpu_dtype`` is what ``auto`` means on the CPUs.

    Raises:
        CheckpointError: The model cannot be read here.
        ConfigError: GPUs were asked for, and there are none.
    """
    placement = place(config, nodes)
    weights = ModelSize.of(model.path)
    problems = [describe_homeless(placed, nodes) for placed in _first_of_each(placement.homeless())]
    sizes: dict[PoolName, EngineSize] = {}
    for pool in POOLS:
        share = placement.shares[pool]
        engine = share.apply(config.engine_config(pool, model=model.path, num_threads=share.num_threads))
        memory_bytes = _memory_of(pool, share, placement)
        try:
            sizes[pool] = size_engine(
                engine, weights, on_gpu=share.num_gpus > 0, memory_bytes=memory_bytes, cpu_dtype=cpu_dtype
            )
        except ConfigError as error:
            problems.append(f"{pool}: {error}")
    return Plan(nodes=tuple(nodes), model=weights, placement=placement, sizes=sizes, problems=tuple(problems))


def _memory_of(pool: PoolName, share: WorkerShare, placement: Placement) -> int | None:
    """The device memory of the pool's worst-off worker: a GPU's, or an even part of its host's."""
    homes = [item.node for item in placement.placed if item.deployment == pool and item.node is not None]
    if share.num_gpus > 0:
        known = [node.gpu_memory_bytes for node in homes if node.gpu_memory_bytes is not None]
        return min(known, default=None)
    return min((node.memory_bytes // num_workers_on(node, placement.placed) for node in homes), default=None)


def _first_of_each(homeless: Sequence[Placed]) -> list[Placed]:
    first: dict[str, Placed] = {}
    for placed in homeless:
        first.setdefault(placed.deployment, placed)
    return list(first.values())


def describe_homeless(placed: Placed, nodes: Sequence[Node]) -> str:
    """Why a process finds no machine: what it takes, and what the machines offer of that."""
    takes = {name: amount for name, amount in placed.demands.items() if amount > 0}
    never = [name for name, amount in takes.items() if all(node.offers.get(name, 0.0) < amount for node in nodes)]
    what = f"{placed.deployment} replica {placed.number} finds no machine: it takes {describe(takes)}"
    if never:
        custom = next((name for name in never if name not in ("CPU", "GPU")), None)
        remedy = f"; start Ray on the machines meant for it with --resources='{{\"{custom}\": 1}}'" if custom else ""
        return f"{what}, and no machine offers {describe({name: takes[name] for name in never})}{remedy}"
    offered = {name: sum(node.offers.get(name, 0.0) for node in nodes) for name in takes}
    fewer = f"{placed.deployment}_replicas" if placed.deployment in POOLS else "router_replicas"
    num_able = sum(all(node.offers.get(name, 0.0) >= amount for name, amount in takes.items()) for node in nodes)
    if placed.at_most is not None and placed.number > placed.at_most * num_able:
        remedy = f"add machines, lower {fewer}, or raise {placed.deployment}.max_per_node"
        return f"{what}, {num_able} machines offer that, and each may have {placed.at_most} at most; {remedy}"
    return f"{what}, and the {len(nodes)} machines together offer {describe(offered)}; add machines or lower {fewer}"


def describe(amounts: Mapping[str, float]) -> str:
    """Resources as people read them."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
