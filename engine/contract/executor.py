"""What computes the steps of an engine, as the builder and the engine's loop see it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.contract.grammar import GrammarCompiler
from engine.contract.step import PendingStep, SchedulerOutput
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is known of an engine once its model is loaded and its KV cache has its size; it never changes.

    layout: what one block holds; among other things the block size and the dtype.
    device: the kind of device that computes, "cpu" or "cuda"; memory: the kind of memory that the KV cache lies in.
    max_model_len: the most tokens, prompt and output together, that a request may have.
    eos_token_ids: the tokens that the checkpoint says end an output.
    num_threads: how many threads compute on a CPU; 0 where a GPU does. thread_speedup: how many times as fast as one of
        them they were with a matrix product, when the engine was built.
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


class StepThreads(Protocol):
    """Decides with how many threads the steps of an engine on a CPU compute. Used from the thread that steps."""

    def begin_step(self) -> bool:
        """Choose those of a step that begins now; True when some compute on cores of idle workers."""

    def between_layers(self) -> None:
        """Choose anew within a long step."""

    @property
    def step_cores(self) -> float:
        """What the last step computed on, on average, in multiples of the engine's own cores."""

    def rest(self) -> None:
        """There is nothing to compute now. Often called."""

    def close(self) -> None:
        """Nothing is computed any more. Idempotent."""


class StepRunner(Protocol):
    """Computes steps: all that the engine's loop asks of an executor, or of a double without a model."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Apply the step's changes of rows, and begin to compute and sample if any row computes.

        On a GPU it returns while the device computes; at most one step before it may be unfinished then, and results
        are asked for in the order of the launches.
        """


class Executor(StepRunner, Protocol):
    """The model on whatever it runs on: this process, or a group of processes that compute each step together."""

    def describe(self) -> EngineFacts:
        """What scheduler and connector are built from, and other workers are told."""

    @property
    def grammars(self) -> GrammarCompiler:
        """Where the grammars of requests are compiled before they run."""

    @property
    def regions(self) -> tuple[KVRegion, ...]:
        """Where the KV cache lies, one region a rank. A connector reads and writes there until ``close``."""

    def follow_threads(self, threads: StepThreads) -> None:
        """Let it choose the number of threads anew between the layers of a long step, from now on."""

    def warm_up(self) -> None:
        """Compute something small, so that the first request does not pay for what happens only once."""

    def close(self) -> None:
        """Free the weights and the KV cache; no step can be launched any more. Idempotent."""
