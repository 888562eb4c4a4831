"""Messages survive the wire, and anything else is refused without harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.peer.notifications import (
    NOTIFICATION_VERSION,
    Ack,
    Announce,
    Done,
    MalformedNotificationError,
    Notification,
    Release,
    Renew,
    decode_notification,
    encode_notification,
)

IDS = st.text(max_size=40)
NOTIFICATIONS = st.one_of(
    st.builds(Done, lease_id=IDS, reader=IDS),
    st.builds(Ack, lease_id=IDS, reader=IDS, is_alive=st.booleans()),
    st.builds(Release, lease_id=IDS),
    st.builds(Renew, lease_ids=st.lists(IDS, max_size=5).map(tuple)),
    st.lists(st.tuples(*[st.integers(0, 99)] * 3), max_size=5).map(
        lambda blocks: Announce(
            request_id="r",
            epoch=1,
            places=tuple(place for place, _, _ in blocks),
            block_ids=tuple(block_id for _, block_id, _ in blocks),
            checksums=tuple(checksum for _, _, checksum in blocks),
        )
    ),
)


@given(NOTIFICATIONS)
def test_notification_survives_the_wire(notification: Notification) -> None:
    assert decode_notification(encode_notification(notification)) == notification


@given(st.binary(max_size=100))
def test_any_bytes_are_decoded_or_refused(message: bytes) -> None:
    try:
        decoded = decode_notification(message)
    except MalformedNotificationError:
        return
    assert decode_notification(encode_notification(decoded)) == decoded


@pytest.mark.parametrize(
    "fields, reason",
    [
        ([NOTIFICATION_VERSION + 1, "release", "lease"], "version"),
        ([True, "release", "lease"], "version"),
        ([NOTIFICATION_VERSION, "dance", "lease"], "unknown kind"),
        ([NOTIFICATION_VERSION, "done", "lease"], "wrong fields"),
        ([NOTIFICATION_VERSION, "ack", "lease", "reader", 1], "wrong fields"),
        ([NOTIFICATION_VERSION, "renew", 3], "wrong fields"),
        ([NOTIFICATION_VERSION, "done", "lease", "r" * 1025], "1025 characters"),
        ([NOTIFICATION_VERSION, "subscribe", "r" * 1025], "1025 characters"),
        ([NOTIFICATION_VERSION, "renew", "a", "r" * 1025], "1025 characters"),
        ([NOTIFICATION_VERSION, "announce", "r", -1, [], [], None], "natural"),
        ([NOTIFICATION_VERSION, "announce", "r", True, [], [], None], "natural"),
        ([NOTIFICATION_VERSION, "announce", "r", 1, [0], [-1], None], "natural"),
        ([NOTIFICATION_VERSION, "announce", "r", 1, [0], [1.5], None], "natural"),
        ([NOTIFICATION_VERSION, "announce", "r", 1, [-1], [0], None], "natural"),
        ([NOTIFICATION_VERSION, "announce", "r", 1, [0], [1, 2], None], "places do not belong"),
        ([NOTIFICATION_VERSION, "announce", "r", 1, [0, 1], [1, 2], [3]], "do not belong"),
        ({"version": NOTIFICATION_VERSION}, "unknown kind"),
        ([], "unknown kind"),
    ],
)
def test_wrong_message_is_refused_with_the_reason(fields: object, reason: str) -> None:
    with pytest.raises(MalformedNotificationError, match=reason):
        decode_notification(json.dumps(fields).encode())


def test_message_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(MalformedNotificationError, match="bytes"):
        decode_notification(b"[" * (2 << 20))


def test_deeply_nested_message_is_refused() -> None:
    with pytest.raises(MalformedNotificationError):
        decode_notification(b"[" * 500_000)
