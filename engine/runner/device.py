"""Where a model runs, and in what precision."""

from __future__ import annotations

import torch

from engine.config import DeviceName, DTypeName
from engine.errors import ConfigError
from engine.models.model_config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: DeviceName) -> torch.device:
    """The device called ``name``; ``auto`` is the GPU where there is one.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device cuda is asked for, but torch finds no CUDA device here; use device cpu or auto")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: DTypeName, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The precision called ``name``; ``auto`` is the checkpoint's for this kind of device.

    Raises:
        ConfigError: The device's attention kernel does not take it.
    """
    checkpoints = model.cpu_dtype if device.type == "cpu" else model.dtype
    dtype = DTYPES[checkpoints if name == "auto" else name]
    if device.type == "cuda" and dtype is torch.float32:
        raise ConfigError(f"dtype float32 ({name}) does not run on cuda; use dtype bfloat16 or float16, or device cpu")
    return dtype
