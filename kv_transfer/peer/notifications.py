"""The small messages that reader and source exchange about a lease, and their wire format.

The format is JSON with the version first. Peers compare protocol versions in the handshake. So a message with another
version is a stray one, and is refused like any malformed message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.errors import KVTransferError

NOTIFICATION_VERSION = 3
_MAX_BYTES = 1 << 20
_MAX_ID_CHARS = 1024
"""Limit on the length of an id. Ids of many leases and prompts are kept in memory, so they must be short."""


class MalformedNotificationError(KVTransferError):
    """Bytes that are not one of our notifications."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"malformed notification: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Reader to source: everything is read; was the lease alive until now? ``reader`` names this read."""

    lease_id: str
    reader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Source to reader: the answer to ``Done``."""

    lease_id: str
    reader: str
    is_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Reader to source: these blocks will not be read."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Reader to source: keep these leases alive, I still want to read."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """Reader to source: announce blocks of this request's prompt to me as they are computed."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Source to reader: these blocks of the prompt are complete; ``places`` say which ones (``block_place``).

    A new ``epoch`` (the numbers only grow) voids everything announced under an older one. ``checksums``: one per block.
    """

    request_id: str
    epoch: int
    places: tuple[int, ...]
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...] | None = None


Notification: TypeAlias = Done | Ack | Release | Renew | Subscribe | Announce


def encode_notification(notification: Notification) -> bytes:
    """The wire form."""
    fields: list[object]
    match notification:
        case Done():
            fields = ["done", notification.lease_id, notification.reader]
        case Ack():
            fields = ["ack", notification.lease_id, notification.reader, notification.is_alive]
        case Release():
            fields = ["release", notification.lease_id]
        case Renew():
            fields = ["renew", *notification.lease_ids]
        case Subscribe():
            fields = ["subscribe", notification.request_id]
        case Announce():
            fields = [
                "announce",
                notification.request_id,
                notification.epoch,
                notification.places,
                notification.block_ids,
                notification.checksums,
            ]
    return json.dumps([NOTIFICATION_VERSION, *fields], separators=(",", ":")).encode()


def decode_notification(message: bytes) -> Notification:
    """Read the wire form.

    Raises:
        MalformedNotificationError: Not JSON, another version, an unknown kind, wrong fields, or an id too long.
    """
    if len(message) > _MAX_BYTES:
        raise MalformedNotificationError(f"{len(message)} bytes, at most {_MAX_BYTES} are accepted")
    try:
        decoded = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise MalformedNotificationError("not JSON") from error
    match decoded:
        case [version, *_] if type(version) is not int or version != NOTIFICATION_VERSION:
            raise MalformedNotificationError(f"version {version!r}, expected {NOTIFICATION_VERSION}")
        case [_, "done", str(lease_id), str(reader)]:
            return Done(lease_id=_id(lease_id), reader=_id(reader))
        case [_, "ack", str(lease_id), str(reader), bool(is_alive)]:
            return Ack(lease_id=_id(lease_id), reader=_id(reader), is_alive=is_alive)
        case [_, "release", str(lease_id)]:
            return Release(lease_id=_id(lease_id))
        case [_, "renew", *lease_ids] if all(isinstance(lease_id, str) for lease_id in lease_ids):
            return Renew(lease_ids=tuple(map(_id, lease_ids)))
        case [_, "subscribe", str(request_id)]:
            return Subscribe(request_id=_id(request_id))
        case [_, "announce", str(request_id), int(epoch), list(places), list(block_ids), checksums]:
            return _announce(request_id, epoch, places, block_ids, checksums)
    raise MalformedNotificationError("unknown kind or wrong fields")


def _announce(
    request_id: str, epoch: int, places: list[object], block_ids: list[object], checksums: object
) -> Announce:
    if len(places) != len(block_ids):
        raise MalformedNotificationError("places do not belong to the blocks")
    if checksums is not None and not (isinstance(checksums, list) and len(checksums) == len(block_ids)):
        raise MalformedNotificationError("checksums do not belong to the blocks")
    return Announce(
        request_id=_id(request_id),
        epoch=_natural(epoch),
        places=tuple(map(_natural, places)),
        block_ids=tuple(_natural(block_id) for block_id in block_ids),
        checksums=None if checksums is None else tuple(_natural(checksum) for checksum in checksums),
    )


def _id(value: str) -> str:
    if len(value) > _MAX_ID_CHARS:
        raise MalformedNotificationError(f"an id of {len(value)} characters, at most {_MAX_ID_CHARS} are accepted")
    return value


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise MalformedNotificationError("a number that must be natural is not")
    return value
