"""How kernels are compiled, and what most of them share."""

import numpy as np
from numba import cfunc, config, njit, types

from engine.kernels.cache_folder import cache_folder
from engine.kernels.machine_code import float_from_bits

FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, so that they run in vector registers; NaN and infinity keep their meaning."""


_FOLDER = cache_folder(config.CACHE_DIR)
if _FOLDER is not None:
    config.CACHE_DIR = str(_FOLDER)

OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy", "cache": _FOLDER is not None}
"""``numpy``: dividing by zero is a number here; an exception would leave the other rows of the batch uncomputed."""

PART_OPTIONS = {**OPTIONS, "cache": False, "forceinline": True}
"""For the parts of a kernel, which are kept with it. A part that stays a function of its own is there twice, optimised
alone and with its kernel, and not to the same bits; which one runs depends on whether this process compiled the kernel
or loaded it."""

STORAGE = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}
"""How a kernel sees the numbers of a dtype; ``widen`` and ``narrow`` know by it what they are."""


def compile_kernel(function):
    """The address of ``function`` as ``void function(void *)``.

    The first call on a machine compiles for seconds, later ones load what that left in the cache folder.
    """
    return cfunc(types.void(types.voidptr), cache=OPTIONS["cache"])(function).address


@njit(**PART_OPTIONS)
def exp(x):
    """e to the x for x <= 0, to about one unit in the last place. Loops over it are vectorised, over libm's not."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    whole = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = x - whole * np.float32(0.693145751953125)
    rest = rest - whole * np.float32(1.428606765330187e-06)
    result = np.float32(1.9875691500e-4)
    result = result * rest + np.float32(1.3981999507e-3)
    result = result * rest + np.float32(8.3334519073e-3)
    result = result * rest + np.float32(4.1665795894e-2)
    result = result * rest + np.float32(1.6666665459e-1)
    result = result * rest + np.float32(5.0000001201e-1)
    result = result * rest * rest + rest + np.float32(1.0)
    return result * float_from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
