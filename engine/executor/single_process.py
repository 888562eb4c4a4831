"""The executor for a model that runs in the scheduler's own process."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.config import EngineConfig
from engine.contract.executor import EngineFacts
from engine.contract.grammar import GrammarCompiler
from engine.contract.step import PendingStep, SchedulerOutput
from engine.device.commit_ahead import CommitAhead
from engine.model.weights.checkpoint import ProgressCallback
from engine.runner.model_runner import ModelRunner
from engine.sampling.grammar.compiler import GrammarStore
from kv_transfer.layout import KVRegion

AHEAD_TOKENS = 4096
"""The memory of the KV cache is committed so far ahead of its use: for some long prompts at once."""


class SingleProcessExecutor:
    """Implements ``Executor`` with one model runner; see there for the arguments. Used from one thread.

    Raises:
        CheckpointError: The directory cannot be loaded.
        ConfigError: The settings contradict the model or the machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: ProgressCallback | None = None,
        max_samples: int | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        self._runner: ModelRunner | None = ModelRunner(
            config, progress=progress, max_samples=max_samples, grammars=grammars
        )
        layout = self.runner.layout
        self._block_bytes = layout.block_bytes
        num_ahead = -(-AHEAD_TOKENS // layout.block_size)
        self._memory = CommitAhead(self.runner.kv_cache.blocks, ahead_bytes=num_ahead * layout.block_bytes)

    @property
    def runner(self) -> ModelRunner:
        """The model runner, for measurements and inspection; the engine itself does not use this."""
        assert self._runner is not None, "the executor is closed"
        return self._runner

    def describe(self) -> EngineFacts:
        """See ``Executor``."""
        runner = self.runner
        return EngineFacts(
            layout=runner.layout,
            num_blocks=runner.num_blocks,
            max_model_len=runner.max_model_len,
            vocab_size=runner.model_config.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            device=runner.device.type,
            memory=runner.region.memory,
            num_threads=runner.num_threads,
            thread_speedup=runner.thread_speedup,
        )

    @property
    def grammars(self) -> GrammarCompiler:
        """See ``Executor``."""
        return self.runner.grammars

    @property
    def regions(self) -> tuple[KVRegion, ...]:
        """See ``Executor``."""
        return (self.runner.region,)

    def call_between_layers(self, hook: Callable[[], None]) -> None:
        """See ``Executor``."""
        self.runner.between_layers = hook

    def warm_up(self) -> None:
        """See ``Executor``."""
        self.runner.warm_up()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """See ``StepRunner``."""
        assert self._runner is not None, "the executor is closed"
        num_bytes = output.num_used_blocks * self._block_bytes
        if num_bytes > self._memory.enough_for:
            self._memory.use(num_bytes)
        return self._runner.launch(output)

    def close(self) -> None:
        """See ``Executor``."""
        self._memory.close()
        if self._runner is not None:
            self._runner.grammars.close()
        self._runner = None
