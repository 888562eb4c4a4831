"""A step's message comes out of its frame as it went in, and what cannot be read is refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import (
    BeamResult,
    CacheChanges,
    DeltaLogprobs,
    DraftCounts,
    FinishReason,
    LoadReport,
    LogprobTable,
    RequestError,
    StepMessage,
    TokenDelta,
    TokenLogprobs,
)
from engine.contract.step_frame import FRAME_VERSION, FrameError, pack_step, unpack_step
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from engine.contract.tracing.request_timings import LoadTiming, RequestTimings, StepTiming
from kv_transfer.params import KVTransferParams, PeerIdentity

LOAD = LoadReport(
    num_blocks=8,
    num_free_blocks=3,
    held_blocks_by_group=(4, 1),
    num_decoding=2,
    num_context_tokens=70,
    counters={"num_steps": 7.5, "n": 3},
    step_time=StepTimeModel(base_s=0.5, prompt_read_s=1e-12, error=0.25, num_steps=9),
    leaning="decode",
)

KV = KVTransferParams(
    protocol_version=4,
    source=PeerIdentity(engine_id="prefill-1", incarnation="x"),
    lease_id="lease",
    layout_hash="layout",
    block_ids=((1, 2), (2,)),
    num_tokens=20,
    checksums=((2**64 - 1, 0), (3,)),
    epoch=2,
)

TIMINGS = RequestTimings(
    request_id="a",
    first_token_s=0.5,
    queue_s=0.125,
    loads=(LoadTiming(start_s=0.125, duration_s=0.25, num_bytes=2**40, num_blocks=3, source="prefill-1"),),
    steps=(StepTiming(start_s=0.375, duration_s=0.125, num_tokens=2048, num_steps=2),),
)

SAID = TokenLogprobs((5, 6), (-0.5, -1.25), 1)


def message(*deltas: TokenDelta) -> StepMessage:
    return StepMessage(deltas=deltas, load=LOAD)


def sent(*deltas: TokenDelta) -> tuple[TokenDelta, ...]:
    """The deltas at the other end."""
    return unpack_step(pack_step(message(*deltas))).deltas


def test_message_arrives_whole() -> None:
    changes = CacheChanges(first_sequence=3, next_sequence=5, stored=b"ab", removed=b"\xff", is_snapshot=True)
    step = StepMessage(
        deltas=(
            TokenDelta("a", (1, 2), num_cached_tokens=16, num_remote_tokens=8, queue_s=0.25),
            TokenDelta("b", (3,), FinishReason.HANDED_OVER, kv_transfer=KV),
            TokenDelta("c", (), FinishReason.ERROR, error=RequestError(code="engine_dead", message="it died")),
            TokenDelta("d", (9,), FinishReason.STOP, stop_token_id=9, logprobs=DeltaLogprobs((SAID,))),
            TokenDelta(
                "e",
                (),
                FinishReason.LENGTH,
                beams=(BeamResult((4, 9), 9, -1.5, -0.75), BeamResult((4,), None, -2.5, -2.5)),
            ),
        ),
        load=LOAD,
        cache=(changes,),
        told=(TIMINGS, DraftCounts("a", 5, 3)),
    )

    assert unpack_step(pack_step(step)) == step


def test_log_probabilities_of_a_prompt_arrive_as_arrays() -> None:
    table = LogprobTable(
        np.arange(6, dtype=np.int32).reshape(3, 2),
        np.linspace(-3, 0, 6, dtype=np.float32).reshape(3, 2),
        np.ones(3, dtype=np.int32),
    )

    (delta,) = sent(TokenDelta("a", (5,), logprobs=DeltaLogprobs((SAID,), table)))

    assert delta.logprobs is not None
    assert delta.logprobs.tokens == (SAID,)
    assert delta.logprobs.prompt is not None
    assert delta.logprobs.prompt.entry(2, 1) == table.entry(2, 1)
    for arrived, original in zip(delta.logprobs.prompt, table, strict=True):
        assert arrived.dtype == original.dtype
        assert np.array_equal(arrived, original)


def test_steps_of_one_request_share_a_delta() -> None:
    first = TokenDelta("a", (1,), num_cached_tokens=16, num_remote_tokens=0, queue_s=0.5)
    last = TokenDelta("a", (3,), FinishReason.STOP, stop_token_id=3)

    assert sent(first, TokenDelta("b", (7,)), TokenDelta("a", (2,)), TokenDelta("b", (8,)), last) == (
        TokenDelta("a", (1, 2, 3), FinishReason.STOP, 3, None, None, 16, 0, None, 0.5),
        TokenDelta("b", (7, 8)),
    )


def test_log_probabilities_stay_with_their_step() -> None:
    deltas = tuple(TokenDelta("a", (token,), logprobs=DeltaLogprobs((SAID,))) for token in (1, 2))

    assert sent(*deltas) == deltas


def test_second_life_of_a_request_is_not_joined_with_its_first() -> None:
    deltas = (TokenDelta("a", (1,), FinishReason.ABORT), TokenDelta("a", (2,), num_cached_tokens=0))

    assert sent(*deltas) == deltas


_DELTAS = st.tuples(
    st.sampled_from("abc"),
    st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none(),
    st.none(),
    st.none() | st.just(KV),
    st.none() | st.integers(0, 100),
    st.none(),
    st.none() | st.just(DeltaLogprobs((SAID,))),
).map(lambda fields: TokenDelta(*fields))


def told(deltas: Iterable[TokenDelta], request_id: str) -> tuple[list[int], list[object]]:
    """A request's tokens, and everything else in its deltas, in order."""
    own = [delta for delta in deltas if delta.request_id == request_id]
    said: list[object] = []
    for delta in own:
        said += [item for item in (delta.num_cached_tokens, delta.logprobs) if item is not None]
        said += [item for item in (delta.finish_reason, delta.kv_transfer) if item is not None]
    return [token_id for delta in own for token_id in delta.token_ids], said


@given(st.lists(_DELTAS, max_size=12))
def test_joining_loses_nothing_and_keeps_each_requests_order(deltas: list[TokenDelta]) -> None:
    arrived = sent(*deltas)

    for request_id in "abc":
        assert told(arrived, request_id) == told(deltas, request_id)


def test_a_worker_that_knows_nothing_of_step_times_is_read_with_none_known() -> None:
    frame = pack_step(message())
    content = msgspec.msgpack.decode(memoryview(frame)[1:])
    for name in ("step_time", "leaning", "num_decoding", "num_context_tokens"):
        del content[1][name]

    load = unpack_step(frame[:1] + msgspec.msgpack.encode(content)).load

    assert (load.step_time, load.leaning, load.num_decoding, load.num_context_tokens) == (UNKNOWN_STEP_TIME, "", 0, 0)
    assert load.num_free_blocks == LOAD.num_free_blocks


def test_a_worker_that_tells_nothing_besides_is_read_and_a_router_that_reads_none_leaves_it_out() -> None:
    step = StepMessage(deltas=(TokenDelta("a", (1,)),), load=LOAD, told=(TIMINGS, DraftCounts("a", 5, 3)))
    frame = pack_step(step)
    content = msgspec.msgpack.decode(memoryview(frame)[1:])

    class Older(msgspec.Struct, array_like=True):
        deltas: tuple[TokenDelta, ...]
        load: LoadReport
        cache: tuple[CacheChanges, ...]

    without_any, without_drafts = (
        unpack_step(frame[:1] + msgspec.msgpack.encode(content[:num_fields])) for num_fields in (3, 4)
    )
    assert without_any == StepMessage(deltas=step.deltas, load=LOAD)
    assert without_drafts == StepMessage(deltas=step.deltas, load=LOAD, told=(TIMINGS,))
    assert msgspec.msgpack.decode(memoryview(frame)[1:], type=Older).deltas == step.deltas


def test_other_version_is_refused_by_its_number() -> None:
    frame = bytes([FRAME_VERSION + 1]) + pack_step(message())[1:]

    with pytest.raises(FrameError, match=f"version {FRAME_VERSION + 1}, but this router reads version {FRAME_VERSION}"):
        unpack_step(frame)


@pytest.mark.parametrize("frame", [b"", message(), bytes([FRAME_VERSION]), pack_step(message())[:-3]])
def test_what_is_no_frame_is_refused(frame: object) -> None:
    with pytest.raises(FrameError):
        unpack_step(frame)
