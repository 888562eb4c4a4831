"""A router's calls to a worker over their connection, and the answers, each as one frame of bytes. Free of torch.

Encoded in MessagePack, with every field by name. A field may be added with a default. Any other change here or in
``GenerateRequest`` needs a new version; a worker that gets another version answers with a failure that names both.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.contract.messages import GenerateRequest, RequestError
from engine.contract.token_ids import TokenIds

CALL_VERSION = 2
"""The first byte of every call and every answer.

1: ``Submit`` and ``Abort``, answered by ``Answer``.
2: ``Move``.
"""


class CallError(Exception):
    """A frame cannot be read as a call or as an answer, or a call cannot be written as one; the text says why."""


class Submit(msgspec.Struct, tag="submit"):
    """Add requests to the engine."""

    requests: tuple[GenerateRequest, ...]


class Abort(msgspec.Struct, tag="abort"):
    """End requests in any state, and leases of ended ones; unknown ids are ignored. An id names one run of a request at
    this worker, so an abort that comes late ends no later run."""

    request_ids: tuple[str, ...]


class Move(msgspec.Struct, tag="move"):
    """Have requests leave for another worker, each with a hand-over.

    Unknown ids are ignored, and with ``only_waiting`` so are requests that have begun.
    """

    request_ids: tuple[str, ...]
    only_waiting: bool = False


class Answer(msgspec.Struct):
    """The answer to a call: to ``Submit`` one refusal or None per request, in order; to ``Abort`` and ``Move`` nothing.

    ``failure``: why the worker could not do it; None if it could.
    """

    refusals: tuple[RequestError | None, ...] = ()
    failure: str | None = None


Call = Submit | Abort | Move


def pack_call(call: Call) -> bytes:
    """A call as bytes.

    Raises:
        CallError: It holds a value that MessagePack cannot encode, such as an integer of more than 64 bits.
    """
    try:
        return _VERSION_BYTE + _encoder.encode(call)
    except (NotImplementedError, OverflowError, TypeError, ValueError) as error:
        raise CallError(f"a call cannot be written: {error}") from error


def unpack_call(frame: bytes) -> Call:
    """The call in a frame; raises CallError."""
    call: Call = _unpack(frame, _call_decoder)
    return call


def pack_answer(answer: Answer) -> bytes:
    """An answer as bytes."""
    return _VERSION_BYTE + _encoder.encode(answer)


def unpack_answer(frame: bytes) -> Answer:
    """The answer in a frame; raises CallError."""
    answer: Answer = _unpack(frame, _answer_decoder)
    return answer


def _unpack(frame: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if frame[:1] != _VERSION_BYTE:
        version = frame[0] if frame else "none"
        raise CallError(f"a call or an answer has version {version}, but this process reads version {CALL_VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except msgspec.DecodeError as error:
        raise CallError(f"a call or an answer of {len(frame)} bytes cannot be read: {error}") from error


def _pack_ids(value: Any) -> bytes:
    if not isinstance(value, TokenIds):
        raise NotImplementedError(f"a call cannot contain a {type(value).__name__}")
    return value.data


def _unpack_ids(_: type, value: Any) -> TokenIds:
    if not isinstance(value, bytes):
        raise ValueError("token ids are bytes")
    return TokenIds(value)


_VERSION_BYTE = bytes([CALL_VERSION])
_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_ids)
_call_decoder = msgspec.msgpack.Decoder(Call, dec_hook=_unpack_ids)
_answer_decoder = msgspec.msgpack.Decoder(Answer)
