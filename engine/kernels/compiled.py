"""How kernels are compiled, where their machine code is cached, and helpers that most of them share."""

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
PRIVATE_FOLDER = 0o700


def cache_folder(wanted: str) -> Path | None:
    """A folder under ``wanted`` if that is given and writable; else beside this file or in the user's cache directory.

    numba recompiles a function when its own file changes, but does not notice changes in functions that it calls from
    other files. So each state of this package has its own folder. Code from the folder is executed, so a folder that
    other users own or can write to is not used.

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
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
            is_ours = _is_ours(folder)
        except (OSError, RuntimeError):  # RuntimeError: this user has no home
            continue
        if is_ours:
            return folder
    return None


def _is_ours(folder: Path) -> bool:
    state = folder.stat()
    return state.st_uid in (os.geteuid(), ROOT_USER) and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered so that they run in vector registers; NaN and infinity keep their meaning."""


FOLDER = cache_folder(config.CACHE_DIR)
"""The cache folder of compiled kernels; None: they are not cached."""

if FOLDER is not None:
    config.CACHE_DIR = str(FOLDER)

OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy", "cache": FOLDER is not None}
"""``numpy``: dividing by zero gives a number. An exception would leave the other rows of the batch uncomputed."""

PART_OPTIONS = {**OPTIONS, "cache": False, "forceinline": True}
"""For functions that are only called from kernels, and cached with them. Without forced inlining numba keeps two
versions of such a function, optimised alone and with its kernel, whose results differ in bits; which one runs would
depend on whether this process compiled the kernel or loaded it."""

BODY_OPTIONS = {**OPTIONS, "cache": False, "inline": "always"}
"""For large functions that one place of a kernel calls: they become part of it before anything is compiled. numba
would optimise them alone first, for nothing, which takes as long as to optimise the kernel."""

STORAGE = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16, "bfloat16 pairs": np.uint32}
"""The type by which a kernel sees numbers of a dtype; ``widen`` and ``narrow`` tell dtypes apart by it. Pairs are only
for ``tile_product``."""


def compile_kernel(function):
    """The address of ``function`` as ``void function(void *)``.

    The first call on a machine compiles for seconds; later ones load the result from the cache folder.
    """
    return cfunc(types.void(types.voidptr), cache=OPTIONS["cache"])(function).address


@njit(**PART_OPTIONS)
def exp(x):
    """e to the x for x <= 0, to about one unit in the last place. Loops over it are vectorised, unlike over libm's."""
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
"""A layer's float32 numbers for scores: SCALE and SOFTCAP; a softcap of 0 is none."""


@njit(**PART_OPTIONS)
def _tanh(x):
    """tanh to a few units in the last place; near zero by its series, since the difference would cancel there."""
    square = x * x
    series = np.float32(-17.0 / 315.0) * square + np.float32(2.0 / 15.0)
    series = (series * square - np.float32(1.0 / 3.0)) * square * x + x
    small = exp(np.float32(-2.0) * abs(x))
    far = (np.float32(1.0) - small) / (np.float32(1.0) + small)
    far = far if x >= np.float32(0.0) else -far
    return series if square < np.float32(0.04) else far


@njit(**PART_OPTIONS)
def cap_scores(scores, count, scale, softcap):
    """Apply ``softcap`` to the first ``count`` scores, which are not multiplied with ``scale`` yet."""
    inner, outer = scale / softcap, softcap / scale
    for t in range(count):
        scores[t] = outer * _tanh(scores[t] * inner)


@njit(**PART_OPTIONS)
def add_to_each(numbers, count, number):
    """Add a number to the first ``count`` numbers. Written as a slice operation it would take numba a second to
    compile, because of the error message for slices that do not fit."""
    for index in range(count):
        numbers[index] += number


@njit(**PART_OPTIONS)
def start_softmax(sinks, has_sinks, scale, group, maxima, totals):
    """Start the running maximum and the sum of weights, before the first key. Rows are the heads of a group in order.

    sinks: scores of the group's heads, already scaled; other scores are still to be multiplied with ``scale``.
    """
    for row in range(len(maxima)):
        maxima[row] = sinks[row % group] / scale if has_sinks else np.float32(-np.inf)
        totals[row] = np.float32(1.0) if has_sinks else np.float32(0.0)
