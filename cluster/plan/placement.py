"""Which machine each process runs on, and how much of the machine it may use."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from cluster.config.config import BatonConfig
from cluster.config.names import ROUTER
from cluster.plan.inventory import Node
from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError

EPSILON = 1e-6
"""Ray reserves resources in steps of 0.0001."""

SMALL_CPU_SHARE = 0.1
"""CPUs that Ray reserves for a process whose number of threads we choose: enough to spread processes over machines, and
too little to keep one from starting."""

SMALLEST_PART = 0.01
"""The smallest part of a GPU that a worker may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPool:
    """A pool of the running cluster: Serve's target number of workers, and the resources that each one takes of its
    machine. None: the same as in the new configuration.
    """

    num_replicas: int
    demands: Mapping[str, float] | None = None


NOTHING_RUNS: Mapping[str, RunningPool] = {}
"""Running pools by name if there is no cluster yet: none."""


class FreeResources:
    """The free resources of one machine. A part of a GPU must come from one GPU: the rests of two do not add up."""

    def __init__(self, node: Node) -> None:
        self._amounts = {name: amount for name, amount in node.offers.items() if name != "GPU"}
        self._gpus = [1.0] * int(node.num_gpus)

    def fit(self, demands: Mapping[str, float]) -> bool:
        """True when all demands can be reserved."""
        amounts = (item for item in demands.items() if item[0] != "GPU")
        enough = all(self._amounts.get(name, 0.0) + EPSILON >= amount for name, amount in amounts if amount > 0)
        return enough and self._choose_gpus(demands.get("GPU", 0.0)) is not None

    def take(self, demands: Mapping[str, float]) -> None:
        """Reserve demands that fit."""
        for index, part in (self._choose_gpus(demands.get("GPU", 0.0)) or {}).items():
            self._gpus[index] -= part
        for name, amount in demands.items():
            if name != "GPU":
                self._amounts[name] = self._amounts.get(name, 0.0) - amount

    def _choose_gpus(self, amount: float) -> dict[int, float] | None:
        """Which GPUs, and how much of each; None: too few. A part is taken from the fullest GPU that has it left."""
        num_whole = int(amount + EPSILON)
        part = amount - num_whole
        untouched = [index for index, free in enumerate(self._gpus) if free >= 1.0 - EPSILON]
        if len(untouched) < num_whole:
            return None
        chosen = dict.fromkeys(untouched[:num_whole], 1.0)
        if part > EPSILON:
            left = {index: free for index, free in enumerate(self._gpus) if index not in chosen}
            enough = [index for index, free in left.items() if free + EPSILON >= part]
            if not enough:
                return None
            chosen[min(enough, key=lambda index: left[index])] = part
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """The share of a machine that one worker gets. ``gpu_share`` is its part of the memory of a shared GPU."""

    num_cpus: float
    num_gpus: float
    num_threads: int
    gpu_share: float
    resources: Mapping[str, float]

    def apply(self, engine: EngineConfig) -> EngineConfig:
        """The engine's settings with its part of a shared GPU's memory."""
        if self.gpu_share >= 1.0:
            return engine
        utilization = engine.cache.gpu_memory_utilization * self.gpu_share
        return dataclasses.replace(engine, cache=dataclasses.replace(engine.cache, gpu_memory_utilization=utilization))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One process and the machine planned for it. In the end Ray decides, by the same demands."""

    deployment: str
    number: int
    node: Node | None
    demands: Mapping[str, float]
    at_most: int | None = None
    """The most processes of this deployment on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The planned machine of every process."""

    placed: tuple[Placed, ...]
    shares: Mapping[str, WorkerShare]
    counts: Mapping[str, int]
    """Processes of each deployment to begin with, or to go on with."""

    room: Mapping[str, bool]
    """Whether one more process of a deployment would fit, as an update without a gap needs."""

    def homeless(self) -> list[Placed]:
        """The processes that fit on no machine."""
        return [placed for placed in self.placed if placed.node is None]

    def on(self, node: Node) -> list[Placed]:
        """The processes on a machine."""
        return [placed for placed in self.placed if placed.node is node]


class NoGpuError(ConfigError):
    """GPUs were asked for, and none of the machines has one: other machines would be a remedy."""


def place(
    config: BatonConfig, nodes: Sequence[Node], *, running: Mapping[str, RunningPool] = NOTHING_RUNS
) -> Placement:
    """Spread all processes over the machines that offer what they need, as Ray will.

    ``running`` are the pools of the cluster that this one replaces. A pool that follows its load keeps its present
    number of workers. If they do not all fit, because the load asked for more than the machines have, it keeps as many
    as fit, but at least the number that it starts with.

    Raises:
        NoGpuError: GPUs were asked for, and there are none.
    """
    running = {pool: running[pool] for pool in config.pools if pool in running}
    board = _Board(nodes)
    demands = {pool: demands_of(config, pool, nodes) for pool in config.pools}
    takes: dict[str, Mapping[str, float]] = {**demands, ROUTER: {"CPU": SMALL_CPU_SHARE}}
    limits = {pool: config.pool(pool).max_per_node for pool in config.pools}
    limits[ROUTER] = 1 if config.router_per_node else None

    def put(name: str, number: int) -> Placed:
        node = board.take(name, takes[name], at_most=limits[name])
        return Placed(deployment=name, number=number, node=node, demands=takes[name], at_most=limits[name])

    wanted = {pool: first_replicas(config, pool, running) for pool in config.pools}
    needed = {pool: min(wanted[pool], first_replicas(config, pool)) for pool in config.pools}
    needed[ROUTER] = _num_routers(config, nodes)
    placed = [put(name, number) for name, count in needed.items() for number in range(1, count + 1)]
    for pool in config.pools:
        grown = (put(pool, number) for number in range(needed[pool] + 1, wanted[pool] + 1))
        placed.extend(itertools.takewhile(lambda item: item.node is not None, grown))
    counts = Counter(item.deployment for item in placed)
    boards = [board]
    if any(pool.demands is not None and _differ(pool.demands, takes[name]) for name, pool in running.items()):
        boards.append(_board_meanwhile(nodes, running, counts, takes))
    return Placement(
        placed=tuple(placed),
        shares={pool: _share(config, pool, demands[pool], placed) for pool in config.pools},
        counts=counts,
        room={name: all(on.has_room(name, takes[name], at_most=limits[name]) for on in boards) for name in counts},
    )


def _differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return any(abs(one.get(name, 0.0) - other.get(name, 0.0)) > EPSILON for name in {*one, *other})


def _board_meanwhile(
    nodes: Sequence[Node],
    running: Mapping[str, RunningPool],
    counts: Mapping[str, int],
    takes: Mapping[str, Mapping[str, float]],
) -> _Board:
    """What is free while the first new worker of a pool starts. Old workers still hold their resources, except surplus
    ones, which end in any case.
    """
    board = _Board(nodes)
    for name, count in counts.items():
        old = running.get(name, RunningPool(num_replicas=0))
        for number in range(count):
            is_old = number < old.num_replicas
            board.take(name, (is_old and old.demands) or takes[name], at_most=None)
    return board


def _num_routers(config: BatonConfig, nodes: Sequence[Node]) -> int:
    if config.router_per_node:
        return max(1, sum(node.num_cpus >= SMALL_CPU_SHARE for node in nodes))
    return config.router_replicas


def demands_of(config: BatonConfig, pool: str, nodes: Sequence[Node]) -> Mapping[str, float]:
    """The resources that Ray reserves for one worker: a CPU share, a GPU (or a part of one, if a single machine has too
    few), and the custom resources that keep the pool on its machines.

    Raises:
        NoGpuError: GPUs were asked for, and there are none.
    """
    section = config.pool(pool)
    num_gpus = sum(node.num_gpus for node in nodes)
    wants_gpu = config.device == "cuda" or (config.device == "auto" and num_gpus > 0)
    if wants_gpu and num_gpus < 1:
        raise NoGpuError("device is cuda, but no machine has a GPU", remedy="set device to cpu or auto")
    if section.num_gpus and not wants_gpu:
        raise NoGpuError(
            f"{pool}.num_gpus is {section.num_gpus:g}, but no machine has a GPU",
            remedy=f"leave {pool}.num_gpus out, or add machines with GPUs",
        )
    share = 0.0
    if wants_gpu:
        is_one_machine = sum(node.num_gpus > 0 for node in nodes) == 1
        share = section.num_gpus or (_even_part(config, num_gpus) if is_one_machine else 1.0)
    cpus = section.num_cpus if section.num_cpus is not None else SMALL_CPU_SHARE
    return {"CPU": cpus, "GPU": share, **section.resources}


def _even_part(config: BatonConfig, num_gpus: float) -> float:
    """The part of a GPU that each worker gets, if all GPUs are in one machine.

    With a single GPU, which all workers share, parts are reserved for workers that the load may add. With several GPUs
    they are not: Ray fills one GPU before it uses the next, so the first workers would share one while others idle.
    """

    def count(pool: str) -> int:
        leaves_room = num_gpus == 1 and config.pool(pool).num_gpus is None
        return most_replicas(config, pool) if leaves_room else first_replicas(config, pool)

    num_parts = math.ceil(sum(count(pool) for pool in config.pools) / num_gpus)
    return max(_rounded_down(1 / num_parts), SMALLEST_PART)


def _share(config: BatonConfig, pool: str, demands: Mapping[str, float], placed: Sequence[Placed]) -> WorkerShare:
    """A worker's share. A machine's cores are divided evenly; all workers of a pool get as many as the poorest one."""
    homes = [item.node for item in placed if item.deployment == pool and item.node is not None]
    num_gpus = demands["GPU"]
    return WorkerShare(
        num_cpus=demands["CPU"],
        num_gpus=num_gpus,
        num_threads=config.pool(pool).num_threads
        or min((max(1, node.num_cores // num_workers_on(node, placed)) for node in homes), default=1),
        gpu_share=num_gpus if 0.0 < num_gpus < 1.0 else 1.0,
        resources={name: amount for name, amount in demands.items() if name not in ("CPU", "GPU")},
    )


def num_workers_on(node: Node, placed: Sequence[Placed]) -> int:
    """The number of engines on a machine."""
    return sum(item.node is node and item.deployment != ROUTER for item in placed)


class _Board:
    """The free resources of all machines."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._free = [(node, FreeResources(node)) for node in nodes]
        self._taken: Counter[tuple[int, str]] = Counter()

    def take(self, deployment: str, demands: Mapping[str, float], *, at_most: int | None) -> Node | None:
        """Reserve on the machine with the fewest processes of this deployment, then of all; None if none has room."""
        fitting = self._fitting(deployment, demands, at_most)
        if not fitting:
            return None
        chosen = min(fitting, key=lambda index: (self._taken[index, deployment], self._taken[index, ""], index))
        node, free = self._free[chosen]
        free.take(demands)
        self._taken[chosen, deployment] += 1
        self._taken[chosen, ""] += 1
        return node

    def has_room(self, deployment: str, demands: Mapping[str, float], *, at_most: int | None) -> bool:
        return bool(self._fitting(deployment, demands, at_most))

    def _fitting(self, deployment: str, demands: Mapping[str, float], at_most: int | None) -> list[int]:
        return [
            index
            for index, (_, free) in enumerate(self._free)
            if free.fit(demands) and (at_most is None or self._taken[index, deployment] < at_most)
        ]


def this_machine(config: BatonConfig) -> Node:
    """The machine that a private Ray runs on. Ray may book more CPUs than there are cores: see ``logical_cpus``."""
    num_cores = usable_cores()
    return Node(
        address="this machine",
        num_cores=num_cores,
        num_cpus=float(logical_cpus(config, num_cores=num_cores)),
        memory_bytes=psutil.virtual_memory().available,
        resources=wanted_resources(config),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def logical_cpus(config: BatonConfig, *, num_cores: int) -> int:
    """CPUs that a private Ray must claim to have, so that every process of the configuration can be placed."""
    workers = 0.0
    for pool in config.pools:
        num_cpus = config.pool(pool).num_cpus
        workers += most_replicas(config, pool) * (num_cpus if num_cpus is not None else SMALL_CPU_SHARE)
    return max(num_cores, math.ceil(workers + config.router_replicas * SMALL_CPU_SHARE) + 1)


def wanted_resources(config: BatonConfig) -> dict[str, float]:
    """The sum of all custom resources of a configuration. A private Ray must offer them, because its only machine
    serves every pool.
    """
    wanted: Counter[str] = Counter()
    for pool in config.pools:
        section = config.pool(pool)
        for name, amount in section.resources.items():
            wanted[name] += math.ceil(most_replicas(config, pool) * amount)
    return {name: float(amount) for name, amount in wanted.items()}


def _rounded_down(share: float) -> float:
    """Rounded down to two decimals: Ray's steps are 0.0001, and the shares of a GPU must not add up to more than 1."""
    return math.floor(share * 100) / 100


def first_replicas(config: BatonConfig, pool: str, running: Mapping[str, RunningPool] = NOTHING_RUNS) -> int:
    """The number of workers that a pool starts with. A running pool that follows its load keeps its number."""
    num_replicas = config.num_replicas(pool)
    scaling = config.pool(pool).scaling
    if scaling is None:
        return num_replicas
    return scaling.first(running[pool].num_replicas if pool in running else num_replicas)


def most_replicas(config: BatonConfig, pool: str) -> int:
    """The largest number of workers that a pool may have."""
    scaling = config.pool(pool).scaling
    return first_replicas(config, pool) if scaling is None else scaling.max_replicas
