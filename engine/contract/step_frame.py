"""A step's message as the frame of bytes that travels from a worker to a router. Free of torch.

Encoded in MessagePack: deltas as arrays of their fields, everything else by name.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from engine.contract.messages import CacheChanges, DraftCounts, LoadReport, StepMessage, TokenDelta, Told, joined
from engine.contract.tracing.request_timings import RequestTimings

FRAME_VERSION = 2
"""The first byte of every frame: which fields follow, and what they mean.

1: ``StepMessage`` in MessagePack. Two additions keep the version, both with a default: a field among those written by
    name, and a last field of the message, which older readers ignore. Any other change needs a new version.
2: a delta may have the outputs of a beam search.
"""


class FrameError(Exception):
    """A frame cannot be read as a step's message; the text says why."""


class _Content(msgspec.Struct, array_like=True, gc=False):
    """The fields of a ``StepMessage``, which follow the version."""

    deltas: tuple[TokenDelta, ...]
    load: LoadReport
    cache: tuple[CacheChanges, ...]
    timings: tuple[RequestTimings, ...] = ()
    drafts: tuple[DraftCounts, ...] = ()


def pack_step(message: StepMessage) -> bytes:
    """A message as a frame. Consecutive deltas of one request are joined where that loses nothing."""
    timings = tuple([told for told in message.told if isinstance(told, RequestTimings)])
    drafts = tuple([told for told in message.told if isinstance(told, DraftCounts)])
    content = _Content(_compact(message.deltas), message.load, message.cache, timings, drafts)
    return _VERSION_BYTE + _encoder.encode(content)


def unpack_step(frame: object) -> StepMessage:
    """The message in a frame.

    Raises:
        FrameError: It has another version, or is no frame.
    """
    if not isinstance(frame, bytes):
        raise FrameError(f"a step came as {type(frame).__name__}, not as a frame: its worker has another version")
    if frame[:1] != _VERSION_BYTE:
        version = frame[0] if frame else "none"
        raise FrameError(f"a step came as a frame of version {version}, but this router reads version {FRAME_VERSION}")
    try:
        content = _decoder.decode(memoryview(frame)[1:])
    except msgspec.DecodeError as error:
        raise FrameError(f"a step's frame of {len(frame)} bytes cannot be read: {error}") from error
    told: tuple[Told, ...] = (*content.timings, *content.drafts)
    return StepMessage(deltas=content.deltas, load=content.load, cache=content.cache, told=told)


def _compact(deltas: tuple[TokenDelta, ...]) -> tuple[TokenDelta, ...]:
    """The deltas of several steps, joined by request and in order; the same tuple if there is nothing to join."""
    if len({delta.request_id for delta in deltas}) == len(deltas):
        return deltas
    runs: dict[str, list[list[TokenDelta]]] = {}
    for delta in deltas:
        of_request = runs.setdefault(delta.request_id, [])
        if of_request and _may_follow(of_request[-1][-1], delta):
            of_request[-1].append(delta)
        else:
            of_request.append([delta])
    return tuple([run[0] if len(run) == 1 else joined(run) for of_request in runs.values() for run in of_request])


def _may_follow(earlier: TokenDelta, later: TokenDelta) -> bool:
    """True when joining the two deltas loses nothing."""
    return (
        earlier.finish_reason is None
        and earlier.kv_transfer is None
        and later.num_cached_tokens is None
        and earlier.logprobs is None
        and later.logprobs is None
    )


def _pack_array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """An array of log-probabilities as its type, its shape and its bytes."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a step's message has no {type(value).__name__}")
    return value.dtype.str, value.shape, value.tobytes()


def _unpack_array(_: type, value: Any) -> Any:
    """The array that ``_pack_array`` wrote; read-only."""
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_VERSION_BYTE = bytes([FRAME_VERSION])
_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_decoder = msgspec.msgpack.Decoder(_Content, dec_hook=_unpack_array)
