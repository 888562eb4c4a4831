"""Runs the model: applies the scheduler's changes, computes a step, samples."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from engine.attention.backend import AttentionBatch
from engine.attention.factory import check_attention
from engine.contract.checkpoint.end_tokens import read_end_tokens
from engine.contract.config import EngineConfig, ModelConfigSource
from engine.contract.errors import ConfigError
from engine.contract.step import (
    NOTHING_SAMPLED,
    IntArray,
    ModelRunnerOutput,
    PendingStep,
    SchedulerOutput,
)
from engine.device.allocation import bound_kernel_caches, keep_freed_memory
from engine.device.copies import upload
from engine.device.kv_cache import KVCache
from engine.device.memory import (
    GPU_CONTEXT_BYTES,
    CacheDemand,
    MemoryBudget,
    choose_num_blocks,
    cpu_budget,
    gpu_budget,
)
from engine.kernels.compiled_once import compile_wanted
from engine.model.loading import LoadedModel, load_model
from engine.model.model_shape import ModelShape
from engine.model.registry import load_model_config
from engine.model.step_context import StepContext
from engine.model.weights.checkpoint import ProgressCallback, model_hash
from engine.runner.cpu_threads import check_threads
from engine.runner.decode_graphs import DecodeGraphs
from engine.runner.decode_steps import run_decode_steps
from engine.runner.device import choose_device, choose_dtype
from engine.runner.device_parts import DeviceParts, plan_decode_graphs
from engine.runner.input_batch import InputBatch
from engine.runner.model_step import ModelStep
from engine.runner.prompt_logprobs import prompt_logprobs
from engine.runner.recorded_steps import RecordedSteps
from engine.runner.step_inputs import LongArray, StepInputs
from engine.sampling.grammar.compiler import GrammarStore
from engine.sampling.most_likely import MostLikely
from engine.sampling.sampler import Sampler
from engine.sampling.worst_case import sample_worst_case
from kv_transfer.layout import KVLayout, KVRegion

logger = logging.getLogger(f"baton.{__name__}")


class ModelRunner:
    """The weights, the KV cache and the rows of one engine. Used from one thread.

    ``parts`` are what depends on the kind of device; tests pass fakes to run the GPU path without a GPU. A step samples
    at most ``max_samples`` tokens, by default one a row. ``grammars``: pass the store of another runner that serves the
    same requests, to share it.

    Raises:
        CheckpointError: The directory cannot be loaded.
        ConfigError: The settings contradict the model or the machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: ProgressCallback | None = None,
        parts: DeviceParts | None = None,
        max_samples: int | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        source = config.model
        self._config = config
        self._parts = parts or DeviceParts()
        self._max_samples = max_samples or config.scheduler.max_num_seqs
        self.model_config: ModelShape = load_model_config(source.path, source.code)
        self.eos_token_ids: tuple[int, ...] = read_end_tokens(source.path)
        self.device = choose_device(source.device)
        check_attention(self.model_config.architecture, self.model_config.attention, self.device.type)
        if self.device.type == "cpu":
            bound_kernel_caches()
        self.dtype = choose_dtype(source.dtype, self.model_config, self.device)
        self.max_model_len = _choose_max_model_len(config.scheduler.max_model_len, self.model_config)
        self.model_config = self.model_config.for_length(self.max_model_len)
        if source.num_threads is not None:
            torch.set_num_threads(source.num_threads)
        self.layout = self._describe_layout()
        self._model = self._load_model(progress)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._graphs = self._plan_graphs()
        self.kv_cache = self._allocate_cache()
        if config.cache.prefault and self.device.type == "cpu":
            self.kv_cache.blocks.zero_()
        self._attention = self._parts.build_attention(self.kv_cache)
        if self._graphs is not None:
            self._graphs.capture(self.kv_cache, self._attention)
        self.grammars = grammars or grammar_store(source)
        self._batch = InputBatch(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=config.cache.block_size,
            windows=[group.window for group in self.layout.groups],
            grammars=self.grammars,
        )
        self._is_cpu = self.device.type == "cpu"
        self._recorded = RecordedSteps(self._model.forward) if self._is_cpu and self._graphs is None else None
        self.num_threads, self.thread_speedup = 0, 0.0
        # Nothing asks for gradients. On a CPU entering the mode costs 30 us a step, since caches are cold then.
        self._enters_inference_mode = not self._is_cpu or self._graphs is not None
        most_likely = MostLikely()
        self._search = most_likely.on_host(self.dtype) if self._is_cpu else None
        self._sampler = Sampler(
            self._batch.sampling, self._batch.history, may_wait=self._is_cpu, most_likely=most_likely
        )
        self._last_step: ModelStep | None = None
        self.between_layers: Callable[[], None] | None = None
        """Called once for each layer that the host computes or launches, before its attention."""

    def _load_model(self, progress: ProgressCallback | None) -> LoadedModel:
        return load_model(
            self._config.model.path,
            self.model_config,
            max_positions=self.max_model_len,
            dtype=self.dtype,
            device=self.device,
            compile_elementwise=self._config.gpu.compile_elementwise,
            progress=progress,
        )

    def _plan_graphs(self) -> DecodeGraphs | None:
        return plan_decode_graphs(
            self._config,
            self._parts,
            self._model.forward,
            device=self.device,
            max_model_len=self.max_model_len,
            max_samples=self._max_samples,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_cache.num_blocks

    @property
    def region(self) -> KVRegion:
        """Where the KV cache lies."""
        return self.kv_cache.region

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes whose decode steps are replayed as graphs."""
        return self._graphs.captured_sizes if self._graphs is not None else ()

    def _describe_layout(self) -> KVLayout:
        shape = self.model_config
        return KVLayout(
            model_hash=model_hash(self._config.model.path, shape),
            groups=shape.kv_cache_groups,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_parts=shape.num_kv_parts,
            block_size=self._config.cache.block_size,
            dtype=str(self.dtype).removeprefix("torch."),
            bytes_per_element=self.dtype.itemsize,
        )

    def _allocate_cache(self) -> KVCache:
        cache, scheduler = self._config.cache, self._config.scheduler
        demand = CacheDemand(
            layout=self.layout,
            max_model_len=self.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            chunk_tokens=scheduler.most_tokens_of_request,
        )
        num_blocks = choose_num_blocks(cache, demand, self._budget(demand))
        logger.info("KV cache: num_blocks=%d block_bytes=%d", num_blocks, self.layout.block_bytes)
        return self._new_cache(num_blocks)

    def _new_cache(self, num_blocks: int) -> KVCache:
        """A cache with a scratch block if decode graphs need one."""
        num_scratch_blocks = 0 if self._graphs is None else 1
        return KVCache(
            self.layout,
            num_blocks=num_blocks,
            dtype=self.dtype,
            device=self.device,
            num_scratch_blocks=num_scratch_blocks,
        )

    def _budget(self, demand: CacheDemand) -> MemoryBudget:
        if self.device.type == "cpu":
            return cpu_budget(self._config.cache, demand)
        peak_step_bytes = self._measure_peak_step()
        graph_bytes = self._measure_graphs()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return gpu_budget(
            self._config.cache,
            total_bytes=total_bytes,
            used_bytes=torch.cuda.memory_reserved(self.device) + GPU_CONTEXT_BYTES,
            peak_step_bytes=peak_step_bytes,
            graph_bytes=graph_bytes,
            free_bytes=free_bytes,
        )

    @torch.inference_mode()
    def _measure_peak_step(self) -> int:
        """Bytes that the largest step allocates on top of the weights, measured by running one and sampling from it."""
        scheduler = self._config.scheduler
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        scratch = KVCache(self.layout, num_blocks=1, dtype=self.dtype, device=self.device)
        num_tokens = scheduler.max_num_batched_tokens
        num_logits = min(self._max_samples, num_tokens)
        logits = self._run_scratch(scratch, num_tokens=num_tokens, num_logits=num_logits)
        sample_worst_case(logits.repeat(num_logits // len(logits) + 1, 1)[:num_logits])
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        peak += self._parts.build_attention(scratch).gathered_bytes(self.max_model_len)
        del scratch, logits
        torch.cuda.empty_cache()
        return peak

    def _measure_graphs(self) -> int:
        """Bytes that decode graphs will take, found by capturing two; 0, unmeasured, if the cache's size is given."""
        if self._graphs is None or self._config.cache.has_size:
            return 0
        scratch = self._new_cache(1)
        return self._graphs.measure(scratch, self._parts.build_attention(scratch))

    def warm_up(self) -> None:
        """Run a prefill chunk and a decode row once, so that the first request does not pay for compilation.

        Writes to a cache of its own. On a CPU it also measures what the threads are worth.
        """
        if self._is_cpu:
            self.num_threads, self.thread_speedup = torch.get_num_threads(), check_threads(self.dtype)
        with torch.inference_mode():
            scratch = KVCache(self.layout, num_blocks=1, dtype=self.dtype, device=self.device)
            self._parts.build_attention(scratch)  # registers the kernels to compile
            compile_wanted()
            for num_tokens in (min(16, self.max_model_len), 1):
                self._run_scratch(scratch, num_tokens=num_tokens, num_logits=1)

    def _run_scratch(self, scratch: KVCache, *, num_tokens: int, num_logits: int) -> torch.Tensor:
        """Logits of a step of zeros, split into requests of at most ``max_model_len`` tokens that all write to the one
        block of ``scratch``.
        """
        lengths = _split(num_tokens, self.max_model_len)
        query_starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        num_columns = -(-max(lengths) // self.layout.block_size)
        num_groups = self.layout.num_groups
        plans = self._parts.build_attention(scratch).plan(
            AttentionBatch(
                query_starts=query_starts,
                first_positions=np.zeros(len(lengths), dtype=np.int32),
                block_tables=np.zeros((num_groups, len(lengths), num_columns), dtype=np.int32),
                slots=np.zeros((num_groups, num_tokens), dtype=np.int64),
            )
        )
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self._model.forward(zeros, StepContext(positions=zeros, plans=plans))
        return self._model.logits(hidden[:num_logits])

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step and wait for its result."""
        return self.launch(output).result()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Apply the scheduler's changes to the rows, then launch compute and sampling on the device; see
        ``StepRunner``.

        Tokens of the step before that the host does not know yet are read on the device. Only sampling that needs them
        on the host (penalties, forbidden phrases) waits for that step, while the device computes this one.
        """
        if output.num_decode_steps > 1:
            return run_decode_steps(self.launch, output)
        if not self._enters_inference_mode:
            return self._launch(output)
        with torch.inference_mode():
            return self._launch(output)

    def write(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Overwrite tokens of rows; no step may be in flight."""
        self._batch.learn(rows, positions, token_ids)

    def _launch(self, output: SchedulerOutput) -> PendingStep:
        if output.copy_sources.size:
            ids = (output.copy_sources.astype(np.int64), output.copy_targets.astype(np.int64))
            self.kv_cache.copy(*map(self._upload, ids))
        if not output.rows.size:
            self._batch.apply(output)
            return NOTHING_SAMPLED
        before = self._last_step
        if before is not None and not before.is_settled:
            self._batch.expect(before.rows, before.positions)
        self._batch.apply(output)
        inputs = self._batch.prepare(output)
        # Rows that take their most likely token have no grammar, so nothing is begun for them.
        if inputs.unknown is None and inputs.last_tokens.size and not inputs.is_argmax_only:
            self._sampler.begin(inputs.sampled_rows, inputs.sampled_positions)
        hidden = self._forward(inputs)
        sampled, has_waited = None, False
        if inputs.last_tokens.size:
            last = hidden if inputs.is_decode else hidden.index_select(0, self._upload(inputs.last_tokens))
            search = self._search if inputs.is_argmax_only and not self._batch.has_unknown else None
            if search is not None and (token_ids := self._model.best_tokens(last)) is not None:
                return self._finish(inputs, token_ids)
            logits = self._model.logits(last)
            if search is not None and (token_ids := search.token_ids(logits)) is not None:
                return self._finish(inputs, token_ids)
            if inputs.unknown is not None and self._sampler.reads_history(inputs.unknown.rows):
                assert before is not None
                before.settle()
                has_waited = True
            sampled = self._sampler.sample(logits, inputs.sampled_rows, inputs.sampled_positions)
        self._last_step = ModelStep(
            output,
            inputs,
            self._batch,
            device=self.device,
            sampled=sampled,
            prompt_logprobs=prompt_logprobs(hidden, inputs, output, self._batch, self._model.logits),
            has_waited=has_waited,
        )
        return self._last_step

    def _finish(self, inputs: StepInputs, token_ids: IntArray) -> PendingStep:
        """Finish a decode step whose tokens are already known on the host."""
        self._batch.learn_later(inputs.sampled_rows, inputs.sampled_positions, token_ids)
        self._last_step = None
        return ModelRunnerOutput(token_ids)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        if self._graphs is not None and (hidden := self._graphs.run(inputs, self._write_unknown)) is not None:
            return hidden
        if inputs.on_host is not None and self._is_cpu:
            input_ids, positions = inputs.on_host
        else:
            input_ids, positions = self._upload(inputs.input_ids), self._upload(inputs.positions)
        if inputs.unknown is not None:
            self._write_unknown(inputs, input_ids)
        if self._recorded is not None:
            hidden = self._recorded.run(inputs, self._attention, self.between_layers)
            if hidden is not None:
                return hidden
        plans = self._attention.plan(inputs.attention)
        return self._model.forward(input_ids, StepContext(positions, plans, self.between_layers))

    def _write_unknown(self, inputs: StepInputs, input_ids: torch.Tensor) -> None:
        """Write the tokens that only the device knows so far into a step's ``input_ids`` on the device."""
        if inputs.unknown is not None:
            assert self._last_step is not None
            sampled = self._last_step.token_ids.index_select(0, self._upload(inputs.unknown.sources))
            input_ids.index_copy_(0, self._upload(inputs.unknown.tokens), sampled.to(torch.int64))

    def _upload(self, array: LongArray) -> torch.Tensor:
        return upload(array, self.device)


def grammar_store(source: ModelConfigSource) -> GrammarStore:
    """A store for the grammars of requests to this model."""
    return GrammarStore(
        source.path,
        vocab_size=load_model_config(source.path, source.code).vocab_size,
        eos_token_ids=read_end_tokens(source.path),
    )


def _choose_max_model_len(asked: int | None, model: ModelShape) -> int:
    if asked is None:
        return model.max_model_len
    if not 1 <= asked <= model.max_model_len:
        raise ConfigError(f"max_model_len must be between 1 and the model's {model.max_model_len}, got {asked}")
    return asked


def _split(total: int, limit: int) -> list[int]:
    """``total`` as a sum of parts of at most ``limit``."""
    full, rest = divmod(total, limit)
    return [limit] * full + ([rest] if rest else [])
