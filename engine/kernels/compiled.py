"""How kernels are compiled, where their machine code is kept, and what most of them share."""

from __future__ import annotations

import os
import stat
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numba import cfunc, config, njit, types

from engine.kernels.machine_code import float_from_bits

ROOT_USER = 0


def cache_folder(wanted: str) -> Path | None:
    """A folder in ``wanted``, if that is not empty and can be written; else beside this file or in the user's caches.

    numba compiles anew when the file of a function changes, and would not see a change in what it calls from other
    files: each state of this package has a folder of its own. What is in it is run, so one that other users can write
    or own is left alone.

    Returns:
        None if no place can be written; all that costs is compiling at every start.
    """
    package = Path(__file__).parent
    sources = b"".join(source.read_bytes() for source in sorted(package.rglob("*.py")))
    name = f"baton-kernels-{blake2b(sources, digest_size=8).hexdigest()}"
    beside, of_user = package / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    for place in (Path(wanted), beside, of_user) if wanted else (beside, of_user):
        try:
            folder = place.expanduser() / name
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
            is_ours = _is_ours(folder)
        except (OSError, RuntimeError):  # RuntimeError: this user has no home
            continue
        if is_ours:
            return folder
    return None


def _is_ours(folder: Path) -> bool:
    state = folder.stat()
    return state.st_uid in (os.geteuid(), ROOT_USER) and not state.st_mode & stat.S_IWOTH


FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, so that they run in vector registers; NaN and infinity keep their meaning."""


FOLDER = cache_folder(config.CACHE_DIR)
"""Where compiled kernels are kept; None: nowhere."""

if FOLDER is not None:
    config.CACHE_DIR = str(FOLDER)

OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy", "cache": FOLDER is not None}
"""``numpy``: dividing by zero is a number here; an exception would leave the other rows of the batch uncomputed."""

PART_OPTIONS = {**OPTIONS, "cache": False, "forceinline": True}
"""For the parts of a kernel, which are kept with it. A part that stays a function of its own is there twice, optimised
alone and with its kernel, and not to the same bits; which one runs depends on whether this process compiled the kernel
or loaded it."""

STORAGE = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16, "bfloat16 pairs": np.uint32}
"""How a kernel sees the numbers of a dtype; ``widen`` and ``narrow`` know by it what they are. Pairs are only for
``tile_product``."""


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


SCALE, SOFTCAP = range(2)
NUM_SCORE_NUMBERS = 2
"""What a layer's scores go by, float32; a softcap of 0 is none."""


@njit(**PART_OPTIONS)
def _tanh(x):
    """The hyperbolic tangent to a few units in the last place: near zero by its series, where a difference cancels."""
    square = x * x
    series = np.float32(-17.0 / 315.0) * square + np.float32(2.0 / 15.0)
    series = (series * square - np.float32(1.0 / 3.0)) * square * x + x
    small = exp(np.float32(-2.0) * abs(x))
    far = (np.float32(1.0) - small) / (np.float32(1.0) + small)
    far = far if x >= np.float32(0.0) else -far
    return series if square < np.float32(0.04) else far


@njit(**PART_OPTIONS)
def cap_scores(scores, count, scale, softcap):
    """Bend the first ``count`` scores, which are still to be multiplied with ``scale``, below ``softcap``."""
    inner, outer = scale / softcap, softcap / scale
    for t in range(count):
        scores[t] = outer * _tanh(scores[t] * inner)


@njit(**PART_OPTIONS)
def add_to_each(numbers, count, number):
    """Add a number to the first ``count``. As an operation on a part of an array it takes numba a second to compile:
    such a part may not fit, which is told in words."""
    for index in range(count):
        numbers[index] += number


@njit(**PART_OPTIONS)
def start_softmax(sinks, has_sinks, scale, group, maxima, totals):
    """The running maximum and the sum of weights before the first key, for rows whose heads follow each other.

    sinks: scores of the group's heads, already multiplied with what ``scale`` will multiply the other scores with.
    """
    for row in range(len(maxima)):
        maxima[row] = sinks[row % group] / scale if has_sinks else np.float32(-np.inf)
        totals[row] = np.float32(1.0) if has_sinks else np.float32(0.0)
