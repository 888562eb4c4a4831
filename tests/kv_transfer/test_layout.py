"""How layers share blocks, and what tells two layouts apart."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import given

from kv_transfer.layout import LATENTS, KVCacheGroup, KVLayout, group_layers
from kv_transfer.peer.handshake import describe_layout


def layout(*windows: int | None) -> KVLayout:
    return KVLayout(
        model_hash="m",
        groups=group_layers(windows),
        num_kv_heads=2,
        head_dim=8,
        block_size=16,
        dtype="bfloat16",
        bytes_per_element=2,
    )


def test_layers_of_one_window_are_one_group() -> None:
    assert group_layers([None, None]) == (KVCacheGroup(layers=(0, 1), window=None),)
    assert group_layers([9, 9, 9]) == (KVCacheGroup(layers=(0, 1, 2), window=9),)


def test_every_fourth_layer_that_sees_everything_makes_one_group_beside_three_with_the_window() -> None:
    assert group_layers([9, 9, 9, None] * 2) == (
        KVCacheGroup(layers=(3, 7), window=None),
        KVCacheGroup(layers=(0, 1), window=9),
        KVCacheGroup(layers=(2, 4), window=9),
        KVCacheGroup(layers=(5, 6), window=9),
    )


@given(st.lists(st.sampled_from((None, 4, 9)), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_of_its_window_and_no_group_is_larger_than_the_rarest_window(
    windows: list[int | None],
) -> None:
    groups = group_layers(windows)

    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert max(len(group.layers) for group in groups) == min(windows.count(window) for window in set(windows))
    widths = [group.window or 1000 for group in groups]
    assert widths == sorted(widths, reverse=True)


def test_a_block_holds_the_layers_of_one_group() -> None:
    whole, mixed = layout(*[None] * 4), layout(None, 32, 32, 32)

    assert (whole.layers_per_block, mixed.layers_per_block) == (4, 1)
    assert mixed.num_layers == 4
    assert mixed.block_bytes * 4 == whole.block_bytes == 4 * 2 * 16 * 2 * 8 * 2
    assert (whole.num_groups, mixed.num_groups) == (1, 4), "a token takes as much in both"


def test_windows_are_part_of_what_two_engines_must_agree_on() -> None:
    assert layout(None, None).layout_hash == layout(None, None).layout_hash
    assert layout(None, None).layout_hash != layout(4, 4).layout_hash
    assert layout(4, 4).layout_hash != dataclasses.replace(layout(4, 4), block_size=8).layout_hash


def test_a_layout_names_its_windows() -> None:
    assert "4 layers, 3 of them with a window of 32," in describe_layout(layout(None, 32, 32, 32))
    assert "4 layers, 2 KV heads" in describe_layout(layout(*[None] * 4))


def test_latents_take_the_room_of_one_part() -> None:
    whole = layout(None, None)
    latents = dataclasses.replace(whole, num_parts=LATENTS)

    assert 2 * latents.block_bytes == whole.block_bytes


def test_latents_are_told_from_keys_and_values_that_take_as_much() -> None:
    whole = layout(None, None)
    latents = dataclasses.replace(whole, num_parts=LATENTS, head_dim=2 * whole.head_dim)

    assert latents.block_bytes == whole.block_bytes
    assert latents.layout_hash != whole.layout_hash
    assert "2 layers, latents of 16, 16 tokens a block" in describe_layout(latents)


def test_digest_of_keys_and_values_is_that_of_engines_that_knew_nothing_else() -> None:
    """Files of a disk tier, and engines of the version before, name layouts by it."""
    assert layout(None, 32).layout_hash == "c6351ceeb6a6c077"
