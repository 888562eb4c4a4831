"""Chooses the device that a model runs on, and the precision."""

from __future__ import annotations

import logging

import torch

from engine.contract.config import DeviceName, DTypeName
from engine.contract.errors import ConfigError
from engine.layers.panel_weight import suits_panels
from engine.model.model_shape import ModelShape

logger = logging.getLogger(f"baton.{__name__}")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: DeviceName) -> torch.device:
    """The device called ``name``; ``auto`` is the GPU if there is one.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no CUDA device here; use device cpu or auto")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(
    name: DTypeName, model: ModelShape, device: torch.device, *, fast_dtypes: frozenset[torch.dtype] | None = None
) -> torch.dtype:
    """The precision called ``name``; ``auto`` is the checkpoint's if the device computes in it.

    On a CPU without 16-bit products the matrix library emulates them: measured with AVX2 only, a bfloat16 product takes
    90 times as long as a float32 one. There ``auto`` means float32. A 16-bit type that is asked for explicitly is
    stored in 16 bits, and multiplied in float32 where weights lie in panels. On a GPU ``auto`` is bfloat16 for a
    float32 checkpoint, or float16 on older GPUs without bfloat16. ``fast_dtypes`` are the types that the device
    computes in; default: this machine's.

    Raises:
        ConfigError: The device's attention kernel does not take it.
    """
    on_cpu = device.type == "cpu"
    dtype = DTYPES[name if name != "auto" else model.cpu_dtype if on_cpu else model.gpu_dtype]
    if on_cpu and dtype not in (cpu_dtypes() if fast_dtypes is None else fast_dtypes):
        if name == "auto":
            logger.info("this CPU has no matrix products in %s: computing in float32", dtype)
            return torch.float32
        if not suits_panels(dtype):
            logger.warning("this CPU emulates matrix products in %s, which is slow; dtype float32 is faster", dtype)
    if not on_cpu:
        return _choose_on_gpu(name, dtype, model.dtype, gpu_dtypes(device) if fast_dtypes is None else fast_dtypes)
    return dtype


def _choose_on_gpu(
    name: DTypeName, dtype: torch.dtype, stored: str, fast_dtypes: frozenset[torch.dtype]
) -> torch.dtype:
    """``dtype`` if the GPU computes in it, else float16 for ``auto``. ``stored`` is the dtype of the checkpoint."""
    if dtype is torch.float32:
        raise ConfigError(
            "dtype float32 is not supported on cuda", remedy="use dtype auto, bfloat16 or float16, or device cpu"
        )
    if dtype in fast_dtypes:
        if name == "auto" and DTYPES[stored] is not dtype:
            logger.info("the checkpoint is in %s, which is not supported on GPUs: computing in %s", stored, dtype)
        return dtype
    if name == "auto":
        logger.warning(
            "this GPU does not support %s: computing in %s, whose largest number is 65,504", dtype, torch.float16
        )
        return torch.float16
    raise ConfigError(f"this GPU does not support {dtype} ({name})", remedy="use dtype float16")


def gpu_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """The 16-bit precisions that a GPU computes in; without a GPU on this machine, both."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return frozenset({torch.float16})
    return frozenset({torch.float16, torch.bfloat16})


def cpu_dtypes() -> frozenset[torch.dtype]:
    """The precisions in which this CPU multiplies matrices, according to its matrix library."""
    has_16_bits = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if not torch._C._has_mkldnn:
        return frozenset({torch.float32, torch.float64})
    return frozenset({torch.float32, torch.float64, *(dtype for dtype, ask in has_16_bits.items() if ask())})
