"""How a virtual worker is built, and how it describes itself."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.config import SchedulerConfig
from engine.contract.messages import WorkerInfo
from kv_transfer.layout import KVCacheGroup, KVLayout
from kv_transfer.params import PeerIdentity
from simulation.machine import Machine
from simulation.step_runner import VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How a worker is built. ``streamed``: prompts of several steps are handed over while they are computed."""

    name: str
    role: str
    machine: Machine
    scheduler: SchedulerConfig
    streamed: bool = True
    report_period_s: float = 0.5
    seed: int = 0


def layout_of(machine: Machine) -> KVLayout:
    """A KV layout whose blocks are as large as the machine's model says. All machines of a cluster serve one model."""
    return KVLayout(
        model_hash="virtual",
        groups=(KVCacheGroup(layers=(0,), window=None),),
        num_kv_heads=1,
        head_dim=machine.kv_bytes_per_token,
        block_size=machine.block_size,
        dtype="uint8",
        bytes_per_element=1,
        num_parts=1,
    )


def worker_info(spec: WorkerSpec, layout: KVLayout, identity: PeerIdentity, address: str) -> WorkerInfo:
    """The constants that such a worker reports, on a host with the given address."""
    machine = spec.machine
    return WorkerInfo(
        role=spec.role,
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        node_ip=address,
        pid=1,
        model_name=machine.name,
        block_size=machine.block_size,
        num_blocks=machine.num_blocks,
        block_bytes=layout.block_bytes,
        max_model_len=machine.max_model_len,
        vocab_size=VOCAB_SIZE,
        device="virtual",
        dtype=layout.dtype,
        stream_chunk_tokens=spec.scheduler.prefill_chunk_tokens if spec.streamed else 0,
        max_num_seqs=spec.scheduler.max_num_seqs,
        num_threads=1,
        borrows_cores=machine.shares_cores,
        num_host_cores=machine.workers_per_host if machine.shares_cores else 0,
    )
