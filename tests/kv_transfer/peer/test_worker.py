"""The connector's thread: what stray messages and its own death cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.connector import ConnectorOrders, LoadOrder, Rendezvous
from kv_transfer.errors import KVTransferError, UnknownConnectorError
from kv_transfer.factory import build_connector
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PROTOCOL_VERSION, Hello, KVTransferParams, PeerIdentity
from kv_transfer.peer.announcements import Announcements
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.peer.poll_period import LAST_PERIOD_S, PollPeriod
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.transport import ReadState
from tests.support.engine.kv_engine import KVEngineSpec
from tests.support.kv.kv_child import NobodyToMeet
from tests.support.kv.scripted_transport import ScriptedRead, ScriptedTransport
from tests.support.waiting import wait_until

LAYOUT = KVEngineSpec(engine_id="any").layout
IDENTITY = PeerIdentity(engine_id="ours", incarnation="1")
REGION = KVRegion(base_address=0, num_blocks=8, block_bytes=LAYOUT.block_bytes, memory=MemoryKind.DRAM, device_index=0)
ORDER = LoadOrder(
    request_id="r",
    params=KVTransferParams(
        protocol_version=PROTOCOL_VERSION,
        source=PeerIdentity(engine_id="theirs", incarnation="1"),
        lease_id="lease",
        layout_hash=LAYOUT.layout_hash,
        block_ids=((1,),),
        num_tokens=4,
    ),
    source_block_ids=(1,),
    block_ids=(2,),
)


class DyingTransport(ScriptedTransport):
    """A transport with a bug."""

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Raise an unexpected error."""
        raise ZeroDivisionError


class StuckRead(ScriptedRead):
    """A read that never ends."""

    def poll(self) -> ReadState:
        """Raise an unexpected error at every call."""
        raise ZeroDivisionError


class LastingBugTransport(ScriptedTransport):
    """A transport whose bug also occurs during the clean-up."""

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> ScriptedRead:
        """Begin what cannot be looked at."""
        self.reads.append(StuckRead(source_block_ids, block_ids))
        return self.reads[-1]


class CountingRendezvous(NobodyToMeet):
    """Counts who is asked for."""

    def __init__(self) -> None:
        self.asked_for: list[str] = []

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Nobody is there."""
        self.asked_for.append(engine_id)
        return super().meet(engine_id, hello, timeout_s=timeout_s)


class PolledTransport(ScriptedTransport):
    """A transport that does not wake the connector."""

    needs_polling = True


class NotedPeriod(PollPeriod):
    """Notes how long the thread slept from look to look."""

    def __init__(self) -> None:
        super().__init__()
        self.periods_s: list[float] = []

    def next_busy_s(self) -> float:
        """The next one."""
        self.periods_s.append(super().next_busy_s())
        return self.periods_s[-1]


def _make_worker(
    transport: ScriptedTransport,
    wake: threading.Event,
    rendezvous: Rendezvous | None = None,
    leases: LeaseTable | None = None,
) -> TransferWorker:
    return TransferWorker(
        options=ConnectorOptions(),
        identity=IDENTITY,
        layout=LAYOUT,
        region=REGION,
        transport=transport,
        rendezvous=rendezvous or NobodyToMeet(),
        leases=leases or LeaseTable(ttl_s=30.0, clock=time.monotonic),
        announcements=Announcements(ttl_s=30.0, clock=time.monotonic),
        wake=wake.set,
        clock=time.monotonic,
        counters=TransferCounters(),
    )


@pytest.mark.known_failure(6)
@pytest.mark.parametrize(
    "message", [b"", b"\xff\xfe", b'[1,"done"]', b'[9,"release","x"]', b'[1,"release","x"]', b'[1,"ack","x","y",true]']
)
def test_stray_message_is_counted_and_harms_nobody(message: bytes) -> None:
    transport = ScriptedTransport()
    worker = _make_worker(transport, threading.Event())
    transport.arrived.append(("stranger", message))
    assert transport.on_event is not None
    transport.on_event()

    wait_until(lambda: worker.stats().num_unknown_notifications == 1)

    worker.close()
    assert transport.is_closed


def test_death_of_the_thread_fails_loads_instead_of_hanging_them(caplog: pytest.LogCaptureFixture) -> None:
    wake = threading.Event()
    worker = _make_worker(DyingTransport(), wake)
    assert wake.wait(120)
    wake.clear()

    worker.execute(ConnectorOrders(loads=(ORDER,)))

    assert wake.wait(120)
    assert not worker.is_alive
    assert [ended.failed_block_ids for ended in worker.collect().loads] == [(2,)]
    assert "the connector's thread stopped" in caplog.text
    worker.close()


def test_thread_that_dies_of_what_it_meets_again_while_tidying_up_still_ends_everything() -> None:
    wake, transport = threading.Event(), LastingBugTransport()
    worker = _make_worker(transport, wake)
    worker.accept(replace(worker.hello, identity=ORDER.params.source))
    wake.clear()

    worker.execute(ConnectorOrders(loads=(ORDER,)))
    wait_until(lambda: not worker._thread.is_alive())
    worker.execute(ConnectorOrders(loads=(replace(ORDER, request_id="later"),)))

    assert wake.is_set()
    assert transport.is_closed
    assert [(ended.request_id, ended.failed_block_ids) for ended in worker.collect().loads] == [
        ("r", (2,)),
        ("later", (2,)),
    ]
    worker.close()


def test_closed_connector_meets_nobody() -> None:
    """Each handshake would be a thread that is never joined; those before the end would make ``close`` wait."""
    rendezvous = CountingRendezvous()
    worker = _make_worker(ScriptedTransport(), threading.Event(), rendezvous)
    worker.close()

    worker.peers.greet("anybody")
    worker.execute(ConnectorOrders(expected=(ORDER.params,), releases=(ORDER.params,), loads=(ORDER,)))

    worker.peers.close()
    assert rendezvous.asked_for == []
    assert [ended.failed_block_ids for ended in worker.collect().loads] == [(2,)]


def test_a_source_looks_often_for_who_reads_what_it_just_leased() -> None:
    """However long others' leases are there already: a reader waits for the answer that its read was good."""
    leases = LeaseTable(ttl_s=30.0, clock=time.monotonic)
    worker = _make_worker(PolledTransport(), threading.Event(), leases=leases)
    worker._poll_period = noted = NotedPeriod()
    leases.grant(request_id="early", block_ids=(1,))
    wait_until(lambda: noted.periods_s[-1:] == [LAST_PERIOD_S])
    num_before = len(noted.periods_s)

    leases.grant(request_id="late", block_ids=(2,))

    wait_until(lambda: min(noted.periods_s[num_before:], default=LAST_PERIOD_S) < LAST_PERIOD_S / 2)
    worker.close()


def _build(connector: str, region: KVRegion = REGION, fabric: InProcessFabric | None = None) -> None:
    rendezvous: Rendezvous = NobodyToMeet()
    build_connector(
        ConnectorOptions(connector=connector),
        identity=IDENTITY,
        layout=LAYOUT,
        region=region,
        rendezvous=rendezvous,
        wake=lambda: None,
        fabric=fabric,
    ).worker.close()


def test_unknown_connector_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(UnknownConnectorError, match=r"'carrier-pigeon'.*: nixl, chain"):
        _build("carrier-pigeon")


def test_in_process_connector_says_what_it_lacks() -> None:
    with pytest.raises(KVTransferError, match="fabric"):
        _build("inproc")
    vram = KVRegion(
        base_address=0, num_blocks=8, block_bytes=LAYOUT.block_bytes, memory=MemoryKind.VRAM, device_index=0
    )
    with pytest.raises(KVTransferError, match="DRAM only"):
        _build("inproc", vram, InProcessFabric())


def test_region_of_other_blocks_than_the_layout_is_refused() -> None:
    region = KVRegion(base_address=0, num_blocks=8, block_bytes=1, memory=MemoryKind.DRAM, device_index=0)
    with pytest.raises(KVTransferError, match="blocks of 1 bytes"):
        _build("inproc", region, InProcessFabric())
