"""The plan of a deployment: machines, placement, and the memory of every engine. Starts and imports no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cluster.config.config import BatonConfig
from cluster.config.names import ROUTER
from cluster.config.served_model import ServedModel
from cluster.plan.change import Change, Key, first_that_helps
from cluster.plan.growth import growth_warnings
from cluster.plan.inventory import Node
from cluster.plan.memory_remedies import memory_changes, memory_remedy
from cluster.plan.place_remedies import describe_lack, machine_remedy, place_changes
from cluster.plan.placement import (
    NOTHING_RUNS,
    Placed,
    Placement,
    RunningPool,
    WorkerShare,
    num_workers_on,
    place,
)
from cluster.plan.sizing import EngineRoom, EngineSize, MisfitError, ModelSize, size_engine
from engine.contract.errors import ConfigError

MAX_REMEDIES = 3
"""The most remedies that are named for one problem. The first ones change the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known before anything starts. ``problems`` are reasons not to start, with remedies.
    ``warnings`` are requirements that Baton cannot ensure, and pools that cannot grow to their maximum."""

    nodes: tuple[Node, ...]
    model: ModelSize
    placement: Placement
    sizes: Mapping[str, EngineSize]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Something that does not fit: a deployment on its machines, or an engine in its memory."""

    subject: tuple[str, str]
    stage: int
    """The problems of a subject show one at a time: once this one is solved, others of higher stages may follow."""

    what: str
    changes: Callable[[], Iterable[Iterator[Change]]]
    """Groups of changes that may help. Of each group, the first one that helps is suggested."""

    otherwise: str
    """The remedy without a change of the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A plan whose problems have no remedies yet."""

    placement: Placement
    sizes: Mapping[str, EngineSize]
    problems: tuple[_Problem, ...]

    @property
    def stages(self) -> dict[tuple[str, str], int]:
        return {problem.subject: problem.stage for problem in self.problems}


def make_plan(
    config: BatonConfig,
    model: ServedModel,
    nodes: Sequence[Node],
    *,
    cpu_dtype: str = "",
    running: Mapping[str, RunningPool] = NOTHING_RUNS,
) -> Plan:
    """Place everything and do the arithmetic of every engine. ``cpu_dtype`` is what ``auto`` means on the CPUs;
    ``running`` are the pools of a cluster that this one replaces, see ``place``.

    Raises:
        CheckpointError: The model cannot be read here.
        ConfigError: GPUs were asked for, and there are none.
    """
    weights = ModelSize.of(model.path, config.model_code)

    def draft(changed: BatonConfig) -> _Draft:
        placement = place(changed, nodes, running=running)
        sizes, problems = _sizes(changed, model, weights, placement, cpu_dtype)
        misplaced = (*_homeless(changed, placement, nodes), *_apart(changed, placement))
        return _Draft(placement=placement, sizes=sizes, problems=(*misplaced, *problems))

    made = draft(config)
    return Plan(
        nodes=tuple(nodes),
        model=weights,
        placement=made.placement,
        sizes=made.sizes,
        problems=tuple(_describe(problem, made, config, draft) for problem in made.problems),
        warnings=(*transfer_warnings(config, made.placement), *growth_warnings(config, nodes)),
    )


def transfer_warnings(config: BatonConfig, placement: Placement) -> Iterator[str]:
    """Requirements on the network, if workers reach each other over it; otherwise nothing."""
    machines = worker_machines(placement)
    if len(machines) > 1:
        yield (
            f"KV moves between {len(machines)} machines over ports of UCX, which have no authentication: whoever can "
            "reach one can read and write that worker's memory. Baton cannot notice that: keep these machines in a "
            "private network (docs/security.md)"
        )
    elif config.transfer_options().transport == "network":
        yield (
            "KV moves over ports of UCX, which have no authentication: whoever can reach one, including other users "
            "of the machine, can read and write that worker's memory. If all workers stay on one machine, set "
            "kv_transfer.transport to local (docs/security.md)"
        )


def transfer_problem(config: BatonConfig, placement: Placement) -> str:
    """Why workers could not reach each other, with the remedy; empty if they can."""
    machines = worker_machines(placement)
    is_local: bool = config.kv_transfer.transport == "local"  # type: ignore[attr-defined]  # made at run time
    if not is_local or len(machines) < 2:
        return ""
    resources = " and ".join(f"{pool}.resources" for pool in config.pools)
    which = "both" if len(config.pools) == 2 else "all"
    return (
        f"kv_transfer.transport is local, but workers would run on {len(machines)} machines ({', '.join(machines)}): "
        f"set it to network, or keep {which} pools on one machine with {resources}"
    )


def worker_machines(placement: Placement) -> list[str]:
    """The addresses of the machines that get workers."""
    homes = (item.node for item in placement.placed if item.deployment != ROUTER and item.node is not None)
    return sorted({node.address for node in homes})


def placement_problem(config: BatonConfig, nodes: Sequence[Node], placement: Placement) -> str:
    """Why not everything fits on the single machine of a private Ray, with remedies; empty if everything fits."""

    def draft(changed: BatonConfig) -> _Draft:
        tried = place(changed, nodes)
        return _Draft(placement=tried, sizes={}, problems=tuple(_homeless(changed, tried, nodes)))

    elsewhere = "use a Ray with more machines (--address)"
    problems = (replace(problem, otherwise=elsewhere) for problem in _homeless(config, placement, nodes))
    made = _Draft(placement=placement, sizes={}, problems=tuple(problems))
    return "; ".join(_describe(problem, made, config, draft) for problem in made.problems)


def _describe(problem: _Problem, made: _Draft, config: BatonConfig, draft: Callable[[BatonConfig], _Draft]) -> str:
    """The problem and its remedies as text."""
    remedies = [change.describe(config) for change in _tried_changes(problem, made, config, draft)]
    every = [*remedies, problem.otherwise] if problem.otherwise else remedies
    return f"{problem.what}; {', or '.join(every)}" if every else problem.what


def _tried_changes(
    problem: _Problem, made: _Draft, config: BatonConfig, draft: Callable[[BatonConfig], _Draft]
) -> list[Change]:
    """Changes that solve a problem and cause no other. If there are none, changes after which the subject only has
    problems of higher stages."""
    before = made.stages

    def helps(changed: BatonConfig, *, wholly: bool) -> bool:
        try:
            after = draft(changed).stages
        except ConfigError:
            return False
        stage = after.get(problem.subject)
        is_gone = stage is None or (not wholly and stage > problem.stage)
        return is_gone and all(subject in before and stage >= before[subject] for subject, stage in after.items())

    for wholly in (True, False):
        first: dict[tuple[Key, ...], Change] = {}
        for changes in problem.changes():
            change = first_that_helps(changes, config, partial(helps, wholly=wholly))
            if change is not None:
                first.setdefault(change.keys, change)
        if first:
            return list(first.values())[:MAX_REMEDIES]
    return []


def _homeless(config: BatonConfig, placement: Placement, nodes: Sequence[Node]) -> Iterator[_Problem]:
    for placed in _first_of_each(placement.homeless()):
        count = sum(item.deployment == placed.deployment for item in placement.placed)
        yield _Problem(
            subject=(placed.deployment, "place"),
            stage=0,
            what=describe_lack(placed, nodes),
            changes=partial(place_changes, placed, placement, config, nodes),
            otherwise=machine_remedy(placed, nodes, count=count),
        )


def _apart(config: BatonConfig, placement: Placement) -> Iterator[_Problem]:
    problem = transfer_problem(config, placement)
    if problem:
        subject = ("kv_transfer", "transport")
        yield _Problem(subject=subject, stage=0, what=problem, changes=lambda: (), otherwise="")


def _sizes(
    config: BatonConfig, model: ServedModel, weights: ModelSize, placement: Placement, cpu_dtype: str
) -> tuple[dict[str, EngineSize], list[_Problem]]:
    sizes: dict[str, EngineSize] = {}
    problems: list[_Problem] = []
    for pool in config.pools:
        share = placement.shares[pool]
        room = EngineRoom.of(
            share.apply(config.engine_config(pool, model=model.path, num_threads=share.num_threads)),
            weights,
            on_gpu=share.num_gpus > 0,
            memory_bytes=_memory_of(pool, share, placement),
            gpu_share=share.gpu_share,
            cpu_dtype=cpu_dtype,
            host_bytes=config.transfer_options().main_memory_bytes(),
            host_memory_bytes=_host_memory_of(pool, placement),
        )
        try:
            sizes[pool] = size_engine(room)
        except MisfitError as error:
            problems.append(
                _Problem(
                    subject=(pool, "memory"),
                    stage=error.stage,
                    what=f"{pool}: {error.what}",
                    changes=partial(memory_changes, pool, room, config),
                    otherwise=memory_remedy(room),
                )
            )
    return sizes, problems


def _memory_of(pool: str, share: WorkerShare, placement: Placement) -> int | None:
    """The device memory of the pool's worst-off worker: a GPU's, or an even part of its host's."""
    homes = [item.node for item in placement.placed if item.deployment == pool and item.node is not None]
    if share.num_gpus > 0:
        known = [node.gpu_memory_bytes for node in homes if node.gpu_memory_bytes is not None]
        return min(known, default=None)
    return _host_memory_of(pool, placement)


def _host_memory_of(pool: str, placement: Placement) -> int | None:
    """The main memory of the pool's worst-off worker: an even part of its host's."""
    homes = [item.node for item in placement.placed if item.deployment == pool and item.node is not None]
    return min((node.memory_bytes // num_workers_on(node, placement.placed) for node in homes), default=None)


def _first_of_each(homeless: Sequence[Placed]) -> list[Placed]:
    first: dict[str, Placed] = {}
    for placed in homeless:
        first.setdefault(placed.deployment, placed)
    return list(first.values())
