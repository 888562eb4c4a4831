"""How much of a machine or a cluster each process may take."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass

from cluster.config import BatonConfig, PoolName, PoolSection
from engine.config import EngineConfig
from engine.errors import ConfigError

SMALL_CPU_SHARE = 0.1
"""CPUs that Ray books for a process whose threads we size ourselves: enough to spread, never a reason not to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to share out."""

    num_cores: int
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """What one worker gets. ``gpu_share`` is its part of the memory of the GPU that it may share with others."""

    num_cpus: float
    num_gpus: float
    num_threads: int
    gpu_share: float

    def apply(self, engine: EngineConfig) -> EngineConfig:
        """The engine's settings with its part of a shared GPU's memory."""
        if self.gpu_share >= 1.0:
            return engine
        utilization = engine.cache.gpu_memory_utilization * self.gpu_share
        return dataclasses.replace(engine, cache=dataclasses.replace(engine.cache, gpu_memory_utilization=utilization))


def share_out(config: BatonConfig, pool: PoolName, machine: Machine) -> WorkerShare:
    """Give each worker of a pool its share: cores split evenly, one GPU each or an even part of one.

    Raises:
        ConfigError: GPUs were asked for, and there are none.
    """
    section: PoolSection = config.prefill if pool == "prefill" else config.decode
    wants_gpu = config.device == "cuda" or (config.device == "auto" and machine.num_gpus > 0)
    if wants_gpu and machine.num_gpus < 1:
        raise ConfigError("device 'cuda' was asked for, but Ray sees no GPU; use --device cpu or auto")
    num_gpus = 0.0
    if wants_gpu:
        num_gpus = section.num_gpus or min(1.0, _rounded_down(machine.num_gpus / config.num_workers))
    return WorkerShare(
        num_cpus=section.num_cpus if section.num_cpus is not None else SMALL_CPU_SHARE,
        num_gpus=num_gpus,
        num_threads=section.num_threads or max(1, machine.num_cores // config.num_workers),
        gpu_share=num_gpus if 0.0 < num_gpus < 1.0 else 1.0,
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def logical_cpus(config: BatonConfig, *, num_cores: int) -> int:
    """CPUs that a private Ray must claim to have, so that every process of the configuration can be placed."""
    pools = (
        (config.prefill, config.prefill_replicas),
        (config.decode, config.decode_replicas),
    )
    workers = sum(
        replicas * (section.num_cpus if section.num_cpus is not None else SMALL_CPU_SHARE)
        for section, replicas in pools
    )
    return max(num_cores, math.ceil(workers + config.router_replicas * SMALL_CPU_SHARE) + 1)


def _rounded_down(share: float) -> float:
    """Two decimals: Ray books no finer than 0.0001, and the shares of one GPU must not add up to more than it."""
    return math.floor(share * 100) / 100
