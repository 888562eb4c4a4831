"""The result of ``dtype: auto`` on a GPU, which is chosen without one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.contract.errors import ConfigError
from engine.model.registry import load_model_config
from engine.runner.device import choose_dtype

CUDA = torch.device("cuda")
HALF = frozenset({torch.float16})
BOTH = HALF | {torch.bfloat16}


@pytest.mark.parametrize(("fast_dtypes", "expected"), [(BOTH, torch.bfloat16), (HALF, torch.float16)])
def test_auto_is_16_bits_on_a_gpu_where_the_checkpoint_is_float32(
    checkpoint: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    fast_dtypes: frozenset[torch.dtype],
    expected: torch.dtype,
) -> None:
    config = load_model_config(checkpoint("llama"))
    assert config.dtype == "float32"

    with caplog.at_level(logging.INFO):
        assert choose_dtype("auto", config, CUDA, fast_dtypes=fast_dtypes) is expected

    (line,) = caplog.messages
    assert str(expected) in line


def test_float32_that_is_asked_for_is_refused_on_a_gpu(checkpoint: Callable[[str], Path]) -> None:
    config = load_model_config(checkpoint("llama"))

    assert choose_dtype("bfloat16", config, CUDA) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"float32 is not supported on cuda; use dtype auto, bfloat16 or float16"):
        choose_dtype("float32", config, CUDA)
