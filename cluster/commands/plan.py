"""`baton plan`: print what would be placed where, and the arithmetic of every device's memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from cluster.config.config import BatonConfig
from cluster.config.served_model import ServedModel
from cluster.plan.inventory import GIB, Node, load_nodes
from cluster.plan.place_remedies import describe
from cluster.plan.placement import NoGpuError, Placement, first_replicas, this_machine
from cluster.plan.plan import Plan, make_plan
from cluster.plan.sizing import EngineSize
from engine.contract.errors import ConfigError
from engine.model.registry import load_model_config
from kv_transfer.layout import KEYS_AND_VALUES
from kv_transfer.options import ConnectorOptions

MIB = 1 << 20


def plan(config: BatonConfig, model: ServedModel, nodes_file: Path | None, console: Console) -> bool:
    """Print the plan. True if it can be carried out.

    Raises:
        ConfigFileError, CheckpointError, ConfigError: It cannot be made.
    """
    made = plan_here(config, model, nodes_file)
    for line in report(config, model, made):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return not made.problems


def plan_here(config: BatonConfig, model: ServedModel, nodes_file: Path | None) -> Plan:
    """The plan for the machines of a file, or for this one."""
    if nodes_file is not None:
        return make_plan(config, model, load_nodes(nodes_file))
    nodes = [_with_gpus(this_machine(config), config)]
    try:
        return make_plan(config, model, nodes, cpu_dtype=_cpu_dtype(config, model))
    except NoGpuError as error:  # on a laptop where a cluster is being planned
        remedy = ", or ".join(filter(None, (error.remedy, "list the machines with --nodes")))
        raise ConfigError(error.what, remedy=remedy) from error


def report(config: BatonConfig, model: ServedModel, made: Plan) -> Iterator[str]:
    """The lines of a plan."""
    size = made.model
    yield f"model {model.name}: {size.config.architecture}, {size.num_parameters / 1e6:,.1f} M parameters"
    yield "machines:"
    for node in made.nodes:
        yield f"  {node.address}: {_describe_node(node)} -> {_describe_places(made.placement, node)}"
    for pool, engine in made.sizes.items():
        count = first_replicas(config, pool)
        scaling = config.pool(pool).scaling
        bounds = f" ({scaling.min_replicas} to {scaling.max_replicas}, depending on the load)" if scaling else ""
        yield f"{pool}: {count} {'worker' if count == 1 else 'workers'}{bounds}, each:"
        yield from (f"  {line}" for line in _describe_engine(engine, made.placement.shares[pool].num_gpus))
        yield from (f"  {line}" for line in _describe_tiers(engine, config.transfer_options()))
    for problem in made.problems:
        yield f"does not fit: {problem}"
    yield from (f"warning: {warning}" for warning in made.warnings)
    for name in config.pools:
        if not made.placement.room[name] and not made.problems:
            yield f"note: no room for one more {name} worker: updates stop each worker before they start its successor"


def _describe_node(node: Node) -> str:
    parts = [f"{node.num_cpus:g} CPUs", f"{node.memory_bytes / GIB:.1f} GiB"]
    if node.num_gpus:
        memory = f" of {node.gpu_memory_bytes / GIB:.1f} GiB" if node.gpu_memory_bytes else ""
        parts.append(f"{node.num_gpus:g} GPU{memory}")
    if node.resources:
        parts.append(describe(node.resources))
    return ", ".join(parts)


def _describe_places(placement: Placement, node: Node) -> str:
    counts = Counter(placed.deployment for placed in placement.on(node))
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _describe_engine(engine: EngineSize, num_gpus: float) -> Iterator[str]:
    layout, demand = engine.demand.layout, engine.demand
    yield f"device: {f'{num_gpus:g} GPU' if num_gpus else 'CPU'}, {engine.dtype}"
    yield f"weights: {_size(engine.weight_bytes)}"
    if engine.draft_bytes:
        yield f"draft model: {_size(engine.draft_bytes)}, its KV cache included"
    heads = f"latents of {layout.head_dim}"
    if layout.num_parts == KEYS_AND_VALUES:
        heads = f"{layout.num_parts} x {layout.num_kv_heads} heads x {layout.head_dim}"
    yield (
        f"KV block: {layout.block_size} tokens x {layout.layers_per_block} layers x {heads} x "
        f"{layout.bytes_per_element} bytes = {layout.block_bytes / 1024:,.1f} KiB"
    )
    if engine.num_blocks is None or engine.num_tokens is None:
        yield "KV cache: sized at startup, by the available memory"
        return
    reason = f" ({engine.reason})" if engine.reason else ""
    yield f"KV cache: {_size(engine.num_blocks * layout.block_bytes)} = {engine.num_blocks:,} blocks{reason}"
    full = engine.num_blocks // demand.blocks_per_sequence
    yield (
        f"holds: {engine.num_tokens:,} tokens: {min(full, demand.max_num_seqs):,} requests of full length "
        f"({demand.max_model_len:,} tokens), {demand.max_num_seqs:,} at most"
    )


def _describe_tiers(engine: EngineSize, options: ConnectorOptions) -> Iterator[str]:
    for tier in options.tiers:
        num_bytes = tier.num_bytes(options)
        num_blocks = num_bytes // engine.demand.layout.block_bytes
        yield f"evicted blocks: {_size(num_bytes)} of {tier.place} = {num_blocks:,} blocks"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"


def _with_gpus(node: Node, config: BatonConfig) -> Node:
    """This machine with its GPUs, if the configuration may use any."""
    if config.device == "cpu":
        return node
    import torch  # imported late: it takes seconds

    count = torch.cuda.device_count()
    if count == 0:
        return node
    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(count))
    return dataclasses.replace(node, num_gpus=float(count), gpu_memory_bytes=memory)


def _cpu_dtype(config: BatonConfig, model: ServedModel) -> str:
    """What ``dtype: auto`` means on this machine's CPU. For other machines it is not known."""
    if config.dtype != "auto":
        return ""
    import torch

    from engine.runner.device import choose_dtype

    dtype = choose_dtype("auto", load_model_config(model.path, config.model_code), torch.device("cpu"))
    return str(dtype).removeprefix("torch.")
