"""How a connector's thread reaches a peer over the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cluster.serve.introductions import ServeRendezvous
from cluster.serve.refusal import HandshakeRefusal
from kv_transfer.errors import HandshakeRefusedError, PeerUnreachableError
from kv_transfer.params import PROTOCOL_VERSION, Hello, PeerIdentity
from tests.support.router.fake_caller import FakeCaller


def hello(name: str) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        identity=PeerIdentity(engine_id=name, incarnation="1"),
        layout_hash="h",
        layout_description="d",
        base_address=0,
        num_blocks=1,
        block_bytes=1,
        memory="DRAM",
        device_index=0,
        agent_metadata=b"",
    )


def answering(answer: Hello | HandshakeRefusal) -> Callable[[Hello], Awaitable[Hello | HandshakeRefusal]]:
    async def handshake(ours: Hello) -> Hello | HandshakeRefusal:
        return answer

    return handshake


async def meet(*callers: FakeCaller, engine_id: str, timeout_s: float = 5.0) -> Hello:
    rendezvous = ServeRendezvous(callers, loop=asyncio.get_running_loop())
    return await asyncio.to_thread(rendezvous.meet, engine_id, hello("me"), timeout_s=timeout_s)


async def test_peer_is_found_in_whichever_deployment_it_lives() -> None:
    prefill = FakeCaller({"p": {"handshake": answering(hello("p"))}})
    decode = FakeCaller({"d": {"handshake": answering(hello("d"))}})

    assert (await meet(prefill, decode, engine_id="d")).identity.engine_id == "d"


async def test_unknown_peer_is_unreachable_within_the_time() -> None:
    with pytest.raises(PeerUnreachableError, match="no running replica"):
        await meet(FakeCaller(), engine_id="gone", timeout_s=0.2)


async def test_peer_that_appears_later_is_met() -> None:
    caller = FakeCaller()
    meeting = asyncio.create_task(meet(caller, engine_id="late"))
    await asyncio.sleep(0)
    caller.replicas["late"] = {"handshake": answering(hello("late"))}

    assert (await meeting).identity.engine_id == "late"


async def test_silent_peer_is_unreachable_within_the_time() -> None:
    async def never(ours: Hello) -> Hello:
        await asyncio.Event().wait()
        return ours

    with pytest.raises(PeerUnreachableError, match="no answer"):
        await meet(FakeCaller({"p": {"handshake": never}}), engine_id="p", timeout_s=0.2)


async def test_refusal_is_raised_from_our_point_of_view() -> None:
    refusal = HandshakeRefusal(what="dtype", ours="float32", theirs="bfloat16")

    with pytest.raises(HandshakeRefusedError) as caught:
        await meet(FakeCaller({"p": {"handshake": answering(refusal)}}), engine_id="p")

    assert (caught.value.ours, caught.value.theirs) == ("bfloat16", "float32")
