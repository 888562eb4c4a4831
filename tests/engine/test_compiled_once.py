"""Processes that want the same kernels share the work of compiling them."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from engine.kernels import compiled_once
from engine.kernels.compiled import cache_folder
from engine.kernels.compiled_once import Kernel, compile_now, compile_wanted, name_of, want

TIMEOUT_S = 800.0

NUM_KERNELS = 6

SEVERAL = """
from functools import partial

from engine.kernels import compiled, norms, rotary, row_argmax
from engine.kernels.compiled_once import compile_wanted, want

made = []
make = compiled.cfunc
def remembered(*arguments, **options):
    return lambda function: made.append(make(*arguments, **options)(function)) or made[-1]

compiled.cfunc = remembered
for dtype in ("float32", "bfloat16"):
    for compile in (norms.compiled_norm, rotary.compiled_rotation, row_argmax.compiled_argmax):
        want(partial(compile, dtype))
print("ready", flush=True)
input()
compile_wanted(patience_s=3600.0)
print(sum(kernel.cache_hits == 0 for kernel in made), len(made))
"""


class Compiler:
    """Makes kernels of which nothing is known but which were made."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self._has_made = threading.Condition()

    def kernel(self, name: str) -> Kernel:
        return partial(self._make, name)

    def other(self, name: str) -> int:
        return self._make(name)

    def _make(self, name: str) -> int:
        with self._has_made:
            self.made.append(name)
            self._has_made.notify_all()
        return len(name)

    def wait_until_made(self, *names: str) -> None:
        with self._has_made:
            assert self._has_made.wait_for(lambda: [*names] == self.made, TIMEOUT_S), self.made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept; what other tests of this process want is not wanted."""
    monkeypatch.setattr(compiled_once, "_wanted", {})
    monkeypatch.setattr(compiled_once, "_compiled", set())
    monkeypatch.setattr(compiled_once, "FOLDER", tmp_path)
    return tmp_path


@contextmanager
def somebody_compiles(kernel: Kernel, folder: Path) -> Iterator[None]:
    """Hold its lock, as another process does."""
    with (folder / f"{kernel.func.__qualname__}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_machine_code_is_kept_where_nobody_else_can_write(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o002)
    try:
        folder = cache_folder(str(tmp_path))
    finally:
        os.umask(before)

    assert folder is not None
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(mode)
    assert cache_folder(str(tmp_path)) != folder


def test_what_another_process_compiles_comes_last_and_is_waited_for(folder: Path) -> None:
    compiler = Compiler()
    for kernel in (partial(compiler.other, "first"), compiler.kernel("second"), compiler.kernel("third")):
        want(kernel)
    compiling = threading.Thread(target=compile_wanted)

    with somebody_compiles(partial(compiler.other, "like the first"), folder):
        compiling.start()
        compiler.wait_until_made("second", "third")
    compiling.join(TIMEOUT_S)

    assert compiler.made == ["second", "third", "first"]


def test_each_is_made_once_by_a_process(folder: Path) -> None:
    compiler = Compiler()
    for name in ("first", "second", "first"):
        want(compiler.kernel(name))
    compile_now(compiler.kernel("second"))
    compile_wanted()
    want(compiler.kernel("first"))
    compile_wanted()

    assert compiler.made == ["second", "first"]


def test_without_waiting_it_is_left_to_who_compiles_it(folder: Path) -> None:
    kernel = Compiler().kernel("first")

    with somebody_compiles(kernel, folder):
        assert not compile_now(kernel, patience_s=0.0)
    assert compile_now(kernel, patience_s=0.0)


def test_process_that_stands_still_is_not_waited_for_for_ever(folder: Path) -> None:
    compiler = Compiler()

    with somebody_compiles(compiler.kernel("first"), folder):
        assert compile_now(compiler.kernel("first"), patience_s=0.05)

    assert compiler.made == ["first"]


def test_one_that_cannot_be_compiled_is_tried_again(folder: Path) -> None:
    tries = iter([RuntimeError("no compiler"), None])

    def make() -> int:
        if error := next(tries):
            raise error
        return 1

    want(partial(make))
    with pytest.raises(RuntimeError, match="no compiler"):
        compile_wanted()
    compile_wanted()
    assert next(tries, "none is left") == "none is left"


@pytest.mark.parametrize("is_there", [True, False])
def test_where_no_lock_can_be_had_it_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(compiled_once, "FOLDER", folder / "missing" if is_there else None)
    compiler = Compiler()
    want(compiler.kernel("first"))
    compile_wanted()

    assert compiler.made == ["first"]


def test_kernels_of_other_arguments_have_other_names() -> None:
    kernels = [partial(make, dtype, wide=wide) for make in (one, other) for dtype in "ab" for wide in (0, 1)]

    assert len({name_of(kernel) for kernel in kernels}) == len(kernels)


def one(dtype: str, *, wide: int) -> int:
    return len(dtype) + wide


def other(dtype: str, *, wide: int) -> int:
    return len(dtype) - wide


def test_two_real_processes_compile_each_kernel_once_between_them(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    with ExitStack() as stack:
        both = []
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", SEVERAL],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            both.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = [process.communicate("\n", timeout=TIMEOUT_S)[0] for process in both]

    compiled, had = zip(*(map(int, output.split()) for output in outputs), strict=True)
    assert had == (NUM_KERNELS, NUM_KERNELS)
    assert sum(compiled) == NUM_KERNELS
