"""Decode steps by graphs equal those without, and their padding rows affect no request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.contract.errors import ConfigError
from engine.device.graph_device import MAX_DRIVER_BYTES
from engine.runner.decode_graphs import MAX_CAPTURE_S, DecodeGraphs, GraphSettings
from engine.runner.device_parts import ladder_sizes
from tests.support.attention.fake_graph_device import FakeGraphDevice
from tests.support.clock import ManualClock
from tests.support.engine.checkpoints import ARCHITECTURES
from tests.support.router.decode_rig import MAX_MODEL_LEN, NUM_BLOCKS, DecodeRig

SIZES = (1, 2, 4, 8)
CheckpointMaker = Callable[[str], Path]


def test_ladder_is_dense_at_first_and_ends_with_the_largest_batch() -> None:
    assert ladder_sizes(1) == (1,)
    assert ladder_sizes(3) == (1, 2, 3)
    assert ladder_sizes(8) == (1, 2, 4, 8)
    assert ladder_sizes(37) == (1, 2, 4, 8, 16, 24, 32, 37)
    assert ladder_sizes(512)[-10:] == (240, 256, 288, 320, 352, 384, 416, 448, 480, 512)


@pytest.mark.parametrize("largest", [2, 7, 9, 100, 128, 129, 300, 1000, 4099])
def test_ladder_pads_no_batch_by_much(largest: int) -> None:
    sizes = ladder_sizes(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert all(upper - lower <= max(8, lower // 8) for lower, upper in pairwise(sizes))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_compute_the_bits_of_the_same_step_without_graphs(
    checkpoint: CheckpointMaker, architecture: str
) -> None:
    """Against the same padded batch, bit for bit: matrix libraries may sum up otherwise for another batch size."""
    rig = DecodeRig.build(checkpoint(architecture), sizes=SIZES)
    rig.capture()
    rng = np.random.default_rng(3)
    for num_rows in (3, 1, 8, 5, 2):
        inputs = rig.random_step(rng, rng.integers(1, 60, num_rows).tolist())
        size = min(size for size in SIZES if size >= num_rows)
        before = rig.blocks_without_scratch()
        eager = rig.run_eagerly(rig.padded(inputs, size))
        alone = rig.run_eagerly(inputs)
        written = rig.blocks_without_scratch()
        rig.cache.blocks[:NUM_BLOCKS] = before

        hidden = rig.run(inputs)

        assert hidden is not None
        assert torch.equal(hidden, eager[:num_rows])
        torch.testing.assert_close(hidden, alone, atol=1e-4, rtol=1e-4)
        assert torch.allclose(rig.blocks_without_scratch(), written, atol=1e-4)
    assert sum(rig.device.num_replays.values()) == 5
    assert rig.device.num_replays.keys() == set(SIZES)


def test_padding_changes_no_block_that_a_request_can_have(checkpoint: CheckpointMaker) -> None:
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES)
    before = rig.blocks_without_scratch()
    rig.capture()
    assert torch.equal(rig.blocks_without_scratch(), before)
    inputs = rig.random_step(np.random.default_rng(0), [17, 40, 1, 33, 16])

    rig.run(inputs)

    changed = (rig.blocks_without_scratch() != before).any(dim=5).flatten(1, 3).any(dim=1)
    block_size = rig.cache.layout.block_size
    slots = {block * block_size + offset for block, offset in changed.nonzero().tolist()}
    assert slots == set(inputs.attention.slots[0].tolist())


def test_what_is_in_the_scratch_block_reaches_no_request(checkpoint: CheckpointMaker) -> None:
    rig = DecodeRig.build(checkpoint("qwen3"), sizes=SIZES)
    rig.capture()
    inputs = rig.random_step(np.random.default_rng(1), [9, 50, 3])
    expected = rig.run_eagerly(rig.padded(inputs, 4))[:3]
    rig.cache.blocks[rig.cache.scratch_block] = torch.nan

    hidden = rig.run(inputs)

    assert hidden is not None
    assert torch.equal(hidden, expected)


def test_a_graph_of_short_rows_holds_for_the_longest(checkpoint: CheckpointMaker) -> None:
    """Past the window of the architecture, and with block tables that are as wide as they ever get."""
    rig = DecodeRig.build(checkpoint("mistral"), sizes=SIZES)
    rig.capture()
    rng = np.random.default_rng(2)
    for lengths in ([1, 2], [MAX_MODEL_LEN, 70], [23, 24], [25, MAX_MODEL_LEN], [1, 1]):
        inputs = rig.random_step(rng, lengths)
        eager = rig.run_eagerly(inputs)
        hidden = rig.run(inputs)
        assert hidden is not None
        assert torch.equal(hidden, eager)


def test_only_steps_of_one_token_a_row_are_for_graphs(checkpoint: CheckpointMaker) -> None:
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES)
    rng = np.random.default_rng(4)
    assert rig.run(rig.random_step(rng, [5])) is None
    rig.capture()
    assert rig.run(rig.with_longer_row(rig.random_step(rng, [5, 7]))) is None
    assert rig.run(rig.random_step(rng, [5] * (SIZES[-1] + 1))) is None
    assert rig.run(rig.random_step(rng, [5] * SIZES[-1])) is not None


def test_largest_is_captured_first(checkpoint: CheckpointMaker) -> None:
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES)
    rig.capture()
    assert rig.device.captured_sizes == [8, 4, 2, 1]
    assert rig.graphs.captured_sizes == SIZES


def test_a_failure_to_capture_leaves_steps_without_graphs_and_says_why(
    checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeGraphDevice(fails=lambda size: RuntimeError("out of memory") if size == 2 else None)
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, device=device)
    with caplog.at_level(logging.WARNING):
        rig.capture()
        rig.capture()
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps run without CUDA graphs, which makes them slower: out of memory"
    ]
    assert rig.graphs.captured_sizes == ()
    assert device.graphs == {}
    assert rig.run(rig.random_step(np.random.default_rng(0), [5])) is None


def test_a_kernel_that_does_not_page_has_no_graphs(
    checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, block_multiple=256)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        rig.capture()
    assert "no attention kernel takes blocks of 16 tokens here" in caplog.text
    assert "set cache.block_size to 256" in caplog.text
    assert rig.graphs.captured_sizes == ()


def test_required_graphs_that_cannot_be_captured_end_the_start(checkpoint: CheckpointMaker) -> None:
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, block_multiple=256, is_required=True)
    with pytest.raises(
        ConfigError, match=r"gpu\.cuda_graphs is true, but .*no attention kernel takes blocks of 16 tokens here"
    ):
        rig.capture()


def test_capturing_ends_in_time_and_the_sizes_left_out_run_without(
    checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()

    def slow(size: int) -> None:
        clock.advance(0.4 * MAX_CAPTURE_S)

    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, device=FakeGraphDevice(fails=slow))
    settings = GraphSettings(sizes=SIZES, max_model_len=MAX_MODEL_LEN)
    graphs = DecodeGraphs(rig.device, rig.harness.model.forward, settings, clock=clock)
    with caplog.at_level(logging.INFO):
        graphs.capture(rig.cache, rig.attention)
    assert graphs.captured_sizes == (2, 4, 8)
    assert "batches of up to 1 rows run without" in caplog.text
    assert "capturing decode graphs: 1 of 4" in caplog.text
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        assert graphs.run(rig.random_step(rng, [5])) is None
        assert graphs.run(rig.random_step(rng, [5, 6])) is not None


def test_what_another_process_takes_meanwhile_is_not_the_graphs(checkpoint: CheckpointMaker) -> None:
    """An engine that starts on the same GPU loads gigabytes while this one measures."""
    device = FakeGraphDevice(bytes_of=lambda _: 1 << 20, others_take=10 << 30)
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, device=device)
    graph_bytes = (1 << 20) + MAX_DRIVER_BYTES
    assert rig.graphs.measure(rig.cache, rig.attention) < (len(SIZES) + 1) * graph_bytes


def test_memory_is_estimated_from_the_two_largest_and_given_back(checkpoint: CheckpointMaker) -> None:
    device = FakeGraphDevice(bytes_of=lambda size: {8: 5000, 4: 300}[size])
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, device=device)
    num_bytes = rig.graphs.measure(rig.cache, rig.attention)
    num_columns = -(-MAX_MODEL_LEN // rig.cache.layout.block_size)
    buffers = 8 * (5 * 8 + 1) + 4 * 8 * num_columns + 4 * 9
    assert num_bytes == rig.cache.layout.block_bytes + buffers + 5500 + 3 * 330
    assert device.graphs == {}
    assert rig.graphs.captured_sizes == ()
    assert rig.run(rig.random_step(np.random.default_rng(0), [5])) is None


def test_graphs_that_cannot_be_measured_take_nothing_and_are_not_tried_again(
    checkpoint: CheckpointMaker, caplog: pytest.LogCaptureFixture
) -> None:
    rig = DecodeRig.build(checkpoint("llama"), sizes=SIZES, block_multiple=256)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert rig.graphs.measure(rig.cache, rig.attention) == 0
        rig.capture()
    assert len(caplog.records) == 1
    assert rig.device.captured_sizes == []
