"""The KV cache's memory can be registered, whatever torch's allocator is set to."""

from __future__ import annotations

import pytest
import torch

from engine.device.allocation import plain_memory, without_expandable_segments


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ("", ""),
        ("expandable_segments:True", "expandable_segments:False"),
        (
            "max_split_size_mb:64, expandable_segments : true,roundup_power2_divisions:8",
            "max_split_size_mb:64, expandable_segments : False,roundup_power2_divisions:8",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_segments_do_not_grow(settings: str, plain: str) -> None:
    assert without_expandable_segments(settings) == plain


def test_settings_are_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with pytest.raises(MemoryError), plain_memory(environment):
        raise MemoryError
    assert said == ["expandable_segments:False", "expandable_segments:True"]


def test_settings_that_are_plain_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    with plain_memory({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}):
        pass
    assert said == []
