"""The executor, which computes an engine's steps, as the builder and the engine's loop see it. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.contract.grammar import GrammarCompiler
from engine.contract.step import PendingStep, SchedulerOutput
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is known of an engine once its model is loaded and its KV cache is sized; it never changes.

    layout: what one block holds, including the block size and the dtype.
    device: the kind of device that computes, "cpu" or "cuda".
    memory: the kind of memory that holds the KV cache.
    max_model_len: the most tokens, prompt and output together, that a request may have.
    eos_token_ids: the tokens that end an output, according to the checkpoint.
    num_threads: how many threads compute on a CPU; 0 where a GPU does.
    thread_speedup: how many times as fast as one of these threads all of them were at a matrix product, when the engine
        was built.
    """

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    memory: MemoryKind
    num_threads: int = 0
    thread_speedup: float = 0.0


LONG_STEP_TOKENS = 64
"""From so many tokens on, a step takes long enough to check between its layers whether other workers compute."""


class StepThreads(Protocol):
    """Chooses how many threads compute the steps of an engine on a CPU. Used only on the thread that steps it."""

    def begin_step(self) -> bool:
        """Choose the threads of a step that begins now; True when some run on cores of idle workers."""

    def between_layers(self) -> None:
        """Choose again during a long step."""

    @property
    def step_cores(self) -> float:
        """The average number of cores of the last step, in multiples of the engine's own cores."""

    def rest(self) -> None:
        """Nothing is to be computed now. Called often."""

    def close(self) -> None:
        """Give the threads up; nothing is computed any more. Idempotent."""


class StepRunner(Protocol):
    """Computes steps: all that the engine's loop needs of an executor, or of a test double without a model."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Apply the step's changes to the rows and, if any row computes, begin to compute and sample.

        On a GPU it returns while the device computes. At most one earlier step may be unfinished then, and results are
        taken in the order of the launches.
        """


class Executor(StepRunner, Protocol):
    """The model on whatever runs it: this process, or a group of processes that compute each step together."""

    def describe(self) -> EngineFacts:
        """The facts from which scheduler and connector are built, and which other workers are told."""

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler for the grammars of requests."""

    @property
    def regions(self) -> tuple[KVRegion, ...]:
        """The memory regions of the KV cache, one per rank. A connector reads and writes them until ``close``."""

    def call_between_layers(self, hook: Callable[[], None]) -> None:
        """From now on, call ``hook`` for each layer of a step, before its attention, on the thread that launched it.

        It is not called where a device computes layers without the host, as with CUDA graphs.
        """

    def warm_up(self) -> None:
        """Run a small computation, so that the first request does not pay for one-time work."""

    def close(self) -> None:
        """Free the weights and the KV cache; no step can be launched afterwards. Idempotent."""
