"""The handshake: what an engine tells a peer about itself, and which peers it refuses."""

from __future__ import annotations

from collections import Counter

from kv_transfer.errors import HandshakeRefusedError
from kv_transfer.layout import LATENTS, KVLayout, KVRegion, MemoryKind
from kv_transfer.params import PROTOCOL_VERSION, Hello, PeerIdentity

_ADDRESS_END = 1 << 64
_MAX_NUM_BLOCKS = (1 << 31) - 1
"""Transports name blocks by 32-bit numbers."""

_MAX_DEVICE_INDEX = (1 << 31) - 1


def describe_layout(layout: KVLayout) -> str:
    """One readable line that shows how two layouts differ."""
    num_layers_of: Counter[int] = Counter()
    for group in layout.groups:
        if group.window is not None:
            num_layers_of[group.window] += len(group.layers)
    windows = "".join(f", {count} of them with a window of {window}" for window, count in num_layers_of.items())
    heads = f"{layout.num_kv_heads} KV heads of {layout.head_dim}"
    if layout.num_parts == LATENTS:
        heads = f"latents of {layout.head_dim}"
    return (
        f"model {layout.model_hash}, {layout.num_layers} layers{windows}, "
        f"{heads}, {layout.block_size} tokens a block, {layout.dtype}"
    )


def build_hello(*, identity: PeerIdentity, layout: KVLayout, region: KVRegion, agent_metadata: bytes) -> Hello:
    """Introduce an engine with its KV region."""
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        identity=identity,
        layout_hash=layout.layout_hash,
        layout_description=describe_layout(layout),
        base_address=region.base_address,
        num_blocks=region.num_blocks,
        block_bytes=region.block_bytes,
        memory=region.memory.value,
        device_index=region.device_index,
        agent_metadata=agent_metadata,
    )


def check_hello(*, ours: Hello, theirs: Hello) -> None:
    """Refuse a peer that we cannot exchange blocks with; the version and the layout are compared first.

    Raises:
        HandshakeRefusedError: Names what differs and both values.
    """
    if theirs.protocol_version != ours.protocol_version:
        raise HandshakeRefusedError(what="protocol version", ours=ours.protocol_version, theirs=theirs.protocol_version)
    if theirs.layout_hash != ours.layout_hash:
        raise HandshakeRefusedError(
            what="KV layout",
            ours=f"{ours.layout_hash} ({ours.layout_description})",
            theirs=f"{theirs.layout_hash} ({theirs.layout_description})",
        )
    if theirs.block_bytes != ours.block_bytes:
        raise HandshakeRefusedError(what="bytes of a block", ours=ours.block_bytes, theirs=theirs.block_bytes)
    if theirs.memory not in tuple(MemoryKind):
        raise HandshakeRefusedError(what="kind of memory", ours=ours.memory, theirs=theirs.memory)
    _check_region(ours=ours, theirs=theirs)


def _check_region(*, ours: Hello, theirs: Hello) -> None:
    """Refuse impossible memory regions: transports compute addresses from these numbers and later block ids."""
    if not 0 < theirs.num_blocks <= _MAX_NUM_BLOCKS:
        raise HandshakeRefusedError(what="number of blocks", ours=ours.num_blocks, theirs=theirs.num_blocks)
    if not 0 <= theirs.base_address <= _ADDRESS_END - theirs.num_blocks * theirs.block_bytes:
        raise HandshakeRefusedError(what="base address", ours=ours.base_address, theirs=theirs.base_address)
    if not 0 <= theirs.device_index <= _MAX_DEVICE_INDEX:
        raise HandshakeRefusedError(what="device index", ours=ours.device_index, theirs=theirs.device_index)
