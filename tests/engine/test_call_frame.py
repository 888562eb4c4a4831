"""A call comes out of its frame as it went in, and what cannot be read or written is refused by name."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace

import msgspec
import pytest

from engine.contract.call_frame import (
    CALL_VERSION,
    Abort,
    Answer,
    CallError,
    Move,
    Submit,
    pack_answer,
    pack_call,
    unpack_answer,
    unpack_call,
)
from engine.contract.messages import BeamParams, GenerateRequest, RequestError, SamplingParams
from engine.contract.promise import Promise
from engine.contract.request_fields import request_field
from engine.contract.token_ids import TokenIds
from engine.contract.tracing.request_timings import TraceContext
from kv_transfer.params import KVStreamParams, KVTransferParams, PeerIdentity

SOURCE = PeerIdentity(engine_id="prefill-1", incarnation="x")

SAMPLING = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    min_p=0.125,
    seed=2**63 + 5,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    no_repeat_ngram_size=3,
    min_tokens=2,
    eos_token_ids=(1, 2),
    stop_token_ids=(3,),
    ignore_eos=True,
    logit_bias=((5, float("-inf")), (6, 1.5)),
    allowed_token_ids=(5, 6),
    bad_words=((1, 2), (3,)),
    num_logprobs=2,
    num_prompt_logprobs=0,
    grammar="start: /ä+/",
    beams=BeamParams(width=4, num_results=2, length_penalty=-0.5, early_stopping="never"),
)

REQUEST = GenerateRequest(
    request_id="r",
    prompt_token_ids=TokenIds.of((1, 2, 2**31 - 1)),
    sampling=SAMPLING,
    output_token_ids=(4, 5),
    priority=-3,
    arrival_s=1.5,
    client_id="router-1",
    hand_over=True,
    kv_transfer=KVTransferParams(
        protocol_version=4,
        source=SOURCE,
        lease_id="lease",
        layout_hash="layout",
        block_ids=((1, 2), ()),
        num_tokens=20,
        checksums=((2**64 - 1, 0), ()),
        epoch=2,
    ),
    kv_stream=KVStreamParams(protocol_version=4, source=SOURCE, timeout_s=2.5),
    cache_salt="salt",
    prediction_token_ids=TokenIds.of([7, 8, 9]),
    max_recomputed_tokens=64,
    promise=Promise(ttft_ms=500.0, itl_ms=40.0),
    trace=TraceContext(traceparent="00-1-2-01", tracestate="a=b"),
    owner="key",
)


def test_a_request_arrives_whole() -> None:
    plain = GenerateRequest(request_id="p", prompt_token_ids=TokenIds(b""), sampling=SamplingParams(max_tokens=1))
    call = Submit((REQUEST, plain))

    arrived = unpack_call(pack_call(call))

    assert arrived == call
    assert isinstance(arrived, Submit)
    assert isinstance(arrived.requests[0].prompt_token_ids, TokenIds)


def test_no_field_of_a_request_is_left_at_its_default_here() -> None:
    plain = GenerateRequest(request_id="", prompt_token_ids=TokenIds(b""), sampling=SamplingParams(max_tokens=1))

    for one, other in ((REQUEST, plain), (SAMPLING, plain.sampling)):
        same = [field.name for field in fields(one) if getattr(one, field.name) == getattr(other, field.name)]
        assert same == [], "give them other values in REQUEST or SAMPLING of this file"


def test_a_router_that_knows_nothing_of_owners_is_read_and_so_is_a_later_one() -> None:
    content = msgspec.msgpack.decode(memoryview(pack_call(Submit((REQUEST,))))[1:])
    del content["requests"][0]["owner"]
    content["requests"][0]["of a later version"] = 1

    arrived = unpack_call(bytes([CALL_VERSION]) + msgspec.msgpack.encode(content))

    assert arrived == Submit((replace(REQUEST, owner=""),))


def test_a_request_that_another_version_pickled_is_read() -> None:
    older = object.__new__(GenerateRequest)
    older.__setstate__(REQUEST.__getstate__()[:-1])  # type: ignore[attr-defined]
    newer = object.__new__(GenerateRequest)
    newer.__setstate__([*REQUEST.__getstate__(), "of a later version"])  # type: ignore[attr-defined]

    assert (older, newer) == (replace(REQUEST, owner=""), REQUEST)
    assert pickle.loads(pickle.dumps(REQUEST)) == REQUEST


@dataclass(frozen=True, kw_only=True)
class LaterParams:
    """The parameters of a logits processor that this version lacks."""

    __slots__ = ()

    later: float = request_field(0.0, float)


@dataclass(frozen=True, kw_only=True)
class LaterSampling(SamplingParams, LaterParams):
    """What a later version pickles; the fields of its new base class come before all others."""


def test_sampling_of_a_version_with_more_or_fewer_logits_processors_is_read() -> None:
    of_both = {item.name: getattr(SAMPLING, item.name) for item in fields(SAMPLING)}
    later, earlier = object.__new__(LaterSampling), object.__new__(SamplingParams)

    earlier.__setstate__(LaterSampling(later=1.0, **of_both).__getstate__())  # type: ignore[attr-defined]
    later.__setstate__(SAMPLING.__getstate__())  # type: ignore[attr-defined]

    assert earlier == pickle.loads(pickle.dumps(SAMPLING)) == SAMPLING
    assert later == LaterSampling(**of_both)


def test_aborts_moves_and_answers_arrive_whole() -> None:
    answer = Answer(refusals=(None, RequestError(code="queue_full", message="no")), failure="EngineDeadError: it died")

    assert unpack_call(pack_call(Abort(("a", "b")))) == Abort(("a", "b"))
    assert unpack_call(pack_call(Move(("a", "b")))) == Move(("a", "b"))
    assert unpack_answer(pack_answer(answer)) == answer


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_number_of_more_than_64_bits_cannot_be_written(seed: int) -> None:
    with pytest.raises(CallError, match="cannot be written"):
        pack_call(Submit((replace(REQUEST, sampling=replace(SAMPLING, seed=seed)),)))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", f"version none, but this process reads version {CALL_VERSION}"),
        (bytes([CALL_VERSION + 1]), f"version {CALL_VERSION + 1}, but this process reads version {CALL_VERSION}"),
        (bytes([CALL_VERSION]) + b"\xc1", "cannot be read"),
        (pack_answer(Answer()), "cannot be read"),
        (pack_call(Submit((REQUEST,))).replace(b"\xc4\x0c", b"\x0c", 1), "cannot be read"),
    ],
)
def test_what_is_no_call_is_refused_by_name(frame: bytes, reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        unpack_call(frame)
