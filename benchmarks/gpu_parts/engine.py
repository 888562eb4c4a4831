"""One engine, stepped in this thread: how long prompts and decode steps take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_parts.shape import LlamaShape
from engine.build import BuiltEngine, build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.offline import run_requests
from engine.runner.model_runner import ModelRunner
from kv_transfer.connector import ConnectorBuilder

MAX_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of both engines of a run, which can be sent to another process. ``share`` is each engine's share of
    the GPU's memory.
    """

    directory: Path
    shape: LlamaShape
    device: str
    block_size: int
    share: float = 0.42

    def config(self) -> EngineConfig:
        """The engine's configuration. A prompt of ``max_model_len`` is computed in one step, so its rate is that of the
        kernels.
        """
        is_gpu = self.device == "cuda"
        return EngineConfig(
            model=ModelConfigSource(path=self.directory, device=self.device, dtype="bfloat16" if is_gpu else "float32"),  # type: ignore[arg-type]
            cache=CacheConfig(
                block_size=self.block_size,
                gpu_memory_utilization=self.share,
                num_blocks=None if is_gpu else 4 * self.shape.max_model_len // self.block_size,
                enable_prefix_caching=False,
            ),
            scheduler=SchedulerConfig(
                max_model_len=self.shape.max_model_len,
                max_num_batched_tokens=self.shape.max_model_len,
                max_num_seqs=MAX_BATCH,
            ),
        )


class EngineBench:
    """An engine under measurement."""

    def __init__(self, settings: Settings, build_connector: ConnectorBuilder | None = None) -> None:
        started = time.perf_counter()
        self.engine: BuiltEngine = build_engine(settings.config(), build_connector=build_connector)
        self.start_s = time.perf_counter() - started
        self.core = self.engine.core
        self._shape = settings.shape
        self._generator = torch.Generator().manual_seed(1)
        self._numbers = itertools.count()

    @property
    def runner(self) -> ModelRunner:
        """The runner, which computes in this process."""
        assert isinstance(self.engine.executor, SingleProcessExecutor)
        return self.engine.executor.runner

    def request(self, num_tokens: int, *, max_tokens: int) -> GenerateRequest:
        """A request whose prompt shares no prefix with any other."""
        ids: list[int] = torch.randint(1, self._shape.vocab_size, (num_tokens,), generator=self._generator).tolist()
        return GenerateRequest(
            request_id=f"bench-{next(self._numbers)}",
            prompt_token_ids=TokenIds.of(ids),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )

    def generate(self, request: GenerateRequest) -> list[int]:
        """Generate all tokens of one request."""
        return [token for delta in run_requests(self.core, [request]) for token in delta.token_ids]

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds from the arrival of a prompt to its first token."""
        request = self.request(num_tokens, max_tokens=1)
        started = time.perf_counter()
        self.generate(request)
        return time.perf_counter() - started

    def decode_step_s(self, batch: int, *, num_prompt_tokens: int, num_steps: int) -> float:
        """Mean seconds of a step that decodes ``batch`` rows."""
        for _ in range(batch):
            self.core.add_request(self.request(num_prompt_tokens, max_tokens=num_steps + 2))
        moments: list[float] = []
        while self.core.has_unfinished():
            num_rows = len(self.core.step().deltas())
            if num_rows == batch:
                moments.append(time.perf_counter())
        if len(moments) < num_steps // 2:
            raise RuntimeError(f"{len(moments)} of {num_steps} steps had all {batch} rows: the KV cache is too small")
        return (moments[-1] - moments[0]) / (len(moments) - 1)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Run steps without CUDA graphs."""
        runner = self.runner
        graphs, runner._graphs = runner._graphs, None
        try:
            yield
        finally:
            runner._graphs = graphs

    def close(self) -> None:
        """Stop the connector."""
        self.core.close()
