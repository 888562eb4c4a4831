"""A reader with a scripted transport, a manual clock, and a source that it can connect to unless it is gone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kv_transfer.connector import LoadEnded, LoadOrder
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.params import PROTOCOL_VERSION, Hello, KVTransferParams, PeerIdentity
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.handshake import build_hello
from kv_transfer.peer.notifications import Ack, Done
from kv_transfer.peer.part_reads import ReaderLimits
from kv_transfer.peer.peers import PeerTable
from kv_transfer.peer.reader import Reader
from kv_transfer.transport import ReadState
from tests.support.engine.kv_engine import KVEngineSpec
from tests.support.kv.scripted_transport import ScriptedTransport

LAYOUT = KVEngineSpec(engine_id="any").layout
BLOCK_BYTES = LAYOUT.block_bytes
SOURCE = PeerIdentity(engine_id="source", incarnation="1")
PARAMS = KVTransferParams(
    protocol_version=PROTOCOL_VERSION,
    source=SOURCE,
    lease_id="lease",
    layout_hash=LAYOUT.layout_hash,
    block_ids=(tuple(range(8)),),
    num_tokens=32,
)


def _hello(identity: PeerIdentity) -> Hello:
    region = KVRegion(base_address=0, num_blocks=64, block_bytes=BLOCK_BYTES, memory=MemoryKind.DRAM, device_index=0)
    return build_hello(identity=identity, layout=LAYOUT, region=region, agent_metadata=b"")


@dataclass
class ReaderBench:
    """A reader with a scripted transport, a manual clock, and a source that it can connect to unless it is gone."""

    limits: ReaderLimits = field(
        default_factory=lambda: ReaderLimits(load_timeout_s=30.0, renewal_period_s=10.0, part_bytes=2 * BLOCK_BYTES)
    )
    is_source_gone: bool = False

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.transport = ScriptedTransport()
        self.counters = TransferCounters()
        self.ended: list[LoadEnded] = []
        self.stalled: list[str] = []
        self.ended_streams: list[str] = []
        self.peers = PeerTable(
            hello=_hello(PeerIdentity(engine_id="reader", incarnation="1")),
            transport=self.transport,
            rendezvous=self,
            clock=lambda: self.now_s,
            handshake_timeout_s=5.0,
            post=self._post,
            counters=self.counters,
        )
        self.reader = Reader(
            name="reader/1",
            region=KVRegion(
                base_address=0, num_blocks=64, block_bytes=BLOCK_BYTES, memory=MemoryKind.DRAM, device_index=0
            ),
            transport=self.transport,
            peers=self.peers,
            limits=self.limits,
            clock=lambda: self.now_s,
            counters=self.counters,
            on_ended=self.ended.append,
            on_stalled=self.stalled.append,
            on_stream_ended=self.ended_streams.append,
        )
        self._posted: list[object] = []

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        if self.is_source_gone:
            raise PeerUnreachableError(engine_id=engine_id, reason="it is gone")
        return _hello(replace(SOURCE, engine_id=engine_id))

    def _post(self, command: object) -> bool:
        self._posted.append(command)
        return True

    def introduce(self, identity: PeerIdentity) -> None:
        self.peers.admit(_hello(identity), is_introduction=True)

    def begin(
        self, request_id: str = "request", num_blocks: int = 4, source: PeerIdentity = SOURCE, *, meets: bool = True
    ) -> None:
        block_ids = tuple(range(num_blocks))
        order = LoadOrder(
            request_id=request_id,
            params=replace(PARAMS, source=source, lease_id=f"lease of {request_id}"),
            source_block_ids=block_ids,
            block_ids=block_ids,
        )
        self.reader.begin(order)
        if meets:
            self.finish_handshakes()

    def finish_handshakes(self) -> None:
        self.peers.close()
        while self._posted:
            command = self._posted.pop(0)
            assert callable(command)
            command()

    def advance(self, times: int = 5) -> None:
        for _ in range(times):
            self.reader.advance()

    def end_reads(self, state: ReadState = ReadState.DONE) -> None:
        for read in self.transport.reads:
            if read.state is ReadState.ACTIVE:
                read.state = state

    def dones(self) -> list[Done]:
        return [message for _, message in self.transport.sent if isinstance(message, Done)]

    def acknowledge(self, *, is_alive: bool = True) -> bool:
        done = self.dones()[-1]
        ack = Ack(lease_id=done.lease_id, reader=done.reader, is_alive=is_alive)
        return self.reader.on_ack(ack, sender="source/1")
