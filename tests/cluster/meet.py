"""Run on a host: introduce an engine's KV region in a file and stay until the standard input ends, or try to meet the
one that another host introduced.

python -m tests.cluster.meet introduce FILE ENGINE
python -m tests.cluster.meet meet FILE ENGINE
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np

from kv_transfer.layout import KVLayout, KVRegion, MemoryKind, group_layers
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.handshake import build_hello
from kv_transfer.transport import TransportError

LAYOUT = KVLayout(
    model_hash="",
    groups=group_layers([None] * 1),
    num_kv_heads=1,
    head_dim=64,
    block_size=16,
    dtype="float32",
    bytes_per_element=4,
)
NUM_BLOCKS = 4


def main(action: str, file: Path, engine_id: str) -> None:
    """Print the result."""
    memory = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, dtype=np.uint8)
    region = KVRegion(
        base_address=memory.ctypes.data,
        num_blocks=NUM_BLOCKS,
        block_bytes=LAYOUT.block_bytes,
        memory=MemoryKind.DRAM,
        device_index=0,
    )
    identity = PeerIdentity(engine_id=engine_id, incarnation="1")
    transport = NixlTransport(identity=identity, region=region)
    try:
        if action == "introduce":
            hello = build_hello(identity=identity, layout=LAYOUT, region=region, agent_metadata=transport.metadata)
            file.write_bytes(pickle.dumps(hello))
            print("introduced", flush=True)
            sys.stdin.read()
        else:
            print("met", transport.add_peer(pickle.loads(file.read_bytes())))
    except TransportError as error:
        print("refused", error)
    finally:
        transport.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
