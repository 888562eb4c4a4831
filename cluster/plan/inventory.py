"""The machines of a cluster, as placement needs them: from a file, from this machine, or from a running Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from cluster.config.config_file import ConfigFileError, describe_problems, read_mapping
from cluster.config.config_section import Section
from cluster.config.pool import OTHER_KEYS, check_amount

GIB = 1 << 30

GPU_MEMORY_GIB = {"T4": 14, "L4": 21, "A10G": 21, "H100": 79, "H200": 139}
"""Memory of GPUs as CUDA reports it, rounded down, by the names in Ray's resource ``accelerator_type``. A100s and V100s
come in two sizes, which Ray does not tell apart."""

MOST = 10_000
"""Limit for amounts of one machine, and for the number of machines of a kind: more is a typing error."""

MOST_GIB = 1_000_000

_NOT_CUSTOM = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. ``num_cpus`` are the CPUs that Ray counts, ``num_cores`` the cores that exist.
    ``gpu_memory_bytes`` is the memory of each GPU."""

    address: str
    num_cores: int
    num_cpus: float
    memory_bytes: int
    num_gpus: float = 0.0
    gpu_memory_bytes: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def offers(self) -> dict[str, float]:
        """All resources that Ray can reserve on it."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}


class NodeSection(Section):
    """Machines of one kind in a nodes file."""

    name: str | None = Field(default=None, description="Name of these machines in the plan.")
    count: int = Field(default=1, ge=1, le=10_000, description="Number of machines of this kind.")
    cpus: int = Field(
        ge=0, le=MOST, description="CPUs per machine. 0: nothing may run there, as on a separate head node."
    )
    memory_gib: float = Field(gt=0, le=MOST_GIB, description="Memory per machine in GiB.")
    gpus: int = Field(default=0, ge=0, le=MOST, description="GPUs per machine.")
    gpu_memory_gib: float | None = Field(default=None, gt=0, le=MOST, description="Memory per GPU in GiB.")
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources per machine.")

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in OTHER_KEYS:
                raise ValueError(f"{name} is not a custom resource: use {name.lower()}s")
            check_amount(name, amount)
        return value


class NodesFile(Section):
    """A nodes file: what `baton plan --nodes` reads."""

    nodes: list[NodeSection] = Field(min_length=1, description="Kinds of machines.")


def load_nodes(path: Path) -> list[Node]:
    """Read a nodes file.

    Raises:
        ConfigFileError: The file is missing, or has invalid values.
    """
    try:
        content = NodesFile.model_validate(read_mapping(path, NodesFile, kind="nodes file"))
    except ValidationError as error:
        raise ConfigFileError(
            "; ".join(describe_problems(error, where=str(path), flags={}, schema=NodesFile))
        ) from error
    return [
        Node(
            address=(section.name or f"machine {kind}") + (f"-{number}" if section.count > 1 else ""),
            num_cores=section.cpus,
            num_cpus=float(section.cpus),
            memory_bytes=int(section.memory_gib * GIB),
            num_gpus=float(section.gpus),
            gpu_memory_bytes=int(section.gpu_memory_gib * GIB) if section.gpu_memory_gib is not None else None,
            resources=section.resources,
        )
        for kind, section in enumerate(content.nodes, start=1)
        for number in range(1, section.count + 1)
    ]


def nodes_of_ray(records: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The living nodes among those that ``ray.nodes()`` lists, in the order of their addresses."""
    living = [record for record in records if record["Alive"]]
    return [_node_of_ray(record) for record in sorted(living, key=lambda record: str(record["NodeManagerAddress"]))]


def _node_of_ray(record: Mapping[str, Any]) -> Node:
    resources: Mapping[str, float] = record["Resources"]
    custom = {
        name: amount
        for name, amount in resources.items()
        if name not in _NOT_CUSTOM and not name.startswith(("node:", "accelerator_type:"))
    }
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    gpu_memory_gib = GPU_MEMORY_GIB.get(kinds[0]) if kinds else None
    num_cpus = resources.get("CPU", 0.0)
    return Node(
        address=str(record["NodeManagerAddress"]),
        num_cores=int(num_cpus),
        num_cpus=num_cpus,
        memory_bytes=int(resources.get("memory", 0.0)),
        num_gpus=resources.get("GPU", 0.0),
        gpu_memory_bytes=gpu_memory_gib * GIB if gpu_memory_gib is not None else None,
        resources=custom,
    )
