"""Changes between states, as JSON merge patches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.live.merge_patch import apply_patch, merge_patch

leaves = st.integers() | st.text(max_size=3) | st.booleans() | st.lists(st.integers(), max_size=2)
objects = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), leaves, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), leaves | inner, max_size=4),
    max_leaves=12,
)


@given(objects, objects)
def test_patch_makes_the_new_state_of_the_old_one(before: dict[str, object], after: dict[str, object]) -> None:
    assert apply_patch(before, merge_patch(before, after)) == after


@given(objects)
def test_nothing_changed_is_an_empty_patch(state: dict[str, object]) -> None:
    assert merge_patch(state, dict(state)) == {}
