"""The store of responses: bounded in number, bytes and time, whatever is put into it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.stored_responses.store import ResponseStore, StoredResponse

OWNERS = st.sampled_from(["", "a", "b"])


def response(name: int, owner: str, size: int) -> StoredResponse:
    return StoredResponse(response_id=f"resp_r_{name}", owner=owner, body=b"x" * size, items=(b"[]",))


@example([(1, "a", 0, 0.0), (1, "", 2, 0.0), (0, "", 1, 0.0)], 2, 1027)
@given(
    st.lists(st.tuples(st.integers(0, 9), OWNERS, st.integers(0, 3000), st.floats(0, 4)), max_size=40),
    st.integers(0, 5),
    st.integers(0, 9000),
)
def test_it_never_holds_more_than_it_may(
    puts: list[tuple[int, str, int, float]], max_count: int, max_bytes: int
) -> None:
    now_s = 0.0
    store = ResponseStore(router_id="r", max_count=max_count, max_bytes=max_bytes, ttl_s=10.0, clock=lambda: now_s)
    newest: dict[str, tuple[float, StoredResponse]] = {}
    for name, owner, size, wait_s in puts:
        now_s += wait_s
        item = response(name, owner, size)
        store.put(item)
        fits = max_count > 0 and item.num_bytes <= max_bytes
        if fits:  # else it changes nothing, and what was kept under its id stays
            newest[item.response_id] = (now_s, item)
        kept = [
            (made_s, item)
            for made_s, item in newest.values()
            if store.take_order("read", item.response_id, owner=item.owner) is item
        ]
        assert len(kept) <= store.num_stored <= max_count
        assert store.num_bytes <= max_bytes
        assert all(now_s - made_s < 10.0 for made_s, _ in kept)
        is_alone = len({each.owner for _, each in kept} | {owner}) == 1
        if fits and is_alone:
            assert item in [each for _, each in kept]
    now_s += 10.0
    store.drop_expired()
    assert (store.num_stored, store.num_bytes) == (0, 0)


@pytest.mark.parametrize("limit", ["count", "bytes"])
def test_one_owner_pushes_out_its_own_alone(limit: str) -> None:
    small = response(0, "a", 100)
    max_count, max_bytes = (10, 10**9) if limit == "count" else (10**6, 10 * small.num_bytes)
    store = ResponseStore(router_id="r", max_count=max_count, max_bytes=max_bytes, ttl_s=10.0)
    store.put(small)
    for name in range(1, 50):
        store.put(response(name, "b", 100))

    assert store.take_order("read", small.response_id, owner="a") is small
    assert store.num_stored == 10
    assert store.take_order("read", "resp_r_49", owner="b") is not None


def test_only_the_owner_finds_it() -> None:
    store = ResponseStore(router_id="r", max_count=9, max_bytes=99_999, ttl_s=10.0)
    item = response(1, "a", 5)
    store.put(item)

    assert store.take_order("delete", item.response_id, owner="b") is None
    assert store.take_order("read", item.response_id, owner="a") is item
    assert store.take_order("delete", item.response_id, owner="a") is item
    assert store.take_order("read", item.response_id, owner="a") is None
