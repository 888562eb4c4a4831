"""The parts of a runner that depend on the device (attention, graph capture), and the batch sizes to capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.factory import build_attention
from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.device.graph_device import GraphDevice, graph_device_of
from engine.device.kv_cache import KVCache
from engine.model.step_context import Forward
from engine.runner.decode_graphs import DecodeGraphs, GraphSettings

DRAFTED_ROWS = 128
"""With draft tokens, steps of up to so many tokens run as graphs even where max_num_seqs is smaller. Larger steps gain
less by a graph, and each size takes memory."""

SMALL_SIZES = (1, 2, 4)
STEP = 8
STEPS_PER_DOUBLING = 8
"""From 128 on, the distance between two sizes doubles with the size: padding stays below an eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """Factories of the attention over a cache, and of the device that captures graphs (None if it cannot)."""

    build_attention: Callable[[KVCache], AttentionBackend] = build_attention
    graph_device: Callable[[torch.device], GraphDevice | None] = graph_device_of


def plan_decode_graphs(
    config: EngineConfig,
    parts: DeviceParts,
    forward: Forward,
    *,
    device: torch.device,
    max_model_len: int,
    max_samples: int,
) -> DecodeGraphs | None:
    """The decode graphs that an engine should have, not captured yet; None if it should have none.

    A step samples at most ``max_samples`` tokens: more than one a request where drafts are verified.

    Raises:
        ConfigError: They are required, and the device cannot capture graphs.
    """
    asked = config.gpu.cuda_graphs
    if asked is False:
        return None
    graph_device = parts.graph_device(device)
    if graph_device is None:
        if asked is True:
            raise ConfigError(f"gpu.cuda_graphs is true, but the device is {device}; set it to auto or false")
        return None
    most_rows = max(config.scheduler.max_num_seqs, min(max_samples, DRAFTED_ROWS))
    largest = min(config.gpu.max_graph_batch_size or most_rows, most_rows)
    settings = GraphSettings(sizes=ladder_sizes(largest), max_model_len=max_model_len, is_required=asked is True)
    return DecodeGraphs(graph_device, forward, settings)


def ladder_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... and ``max_batch_size`` itself, ascending."""
    sizes = [size for size in SMALL_SIZES if size < max_batch_size]
    size = STEP
    while size < max_batch_size:
        sizes.append(size)
        size += max(STEP, (1 << (size.bit_length() - 1)) // STEPS_PER_DOUBLING)
    return (*sizes, max_batch_size)
