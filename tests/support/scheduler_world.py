"""A world around one scheduler: a cache whose content is checked, a runner that is strict, and a peer that may fail.

The KV of a position is a number that stands for all tokens up to it, so that every number a row attends to can be
compared with what it must be. Steps run when they *return*, and loads write when they *end*: a block that was reused
too early is overwritten at the worst moment, and noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from engine.config import CacheConfig, SchedulerConfig
from engine.core.scheduler import Scheduler
from engine.core.step_result import StepResult
from engine.messages import FinishReason, GenerateRequest, TokenDelta
from engine.step import ModelRunnerOutput, NewRow, SchedulerOutput
from kv_transfer.connector import ConnectorEvents, LeaseEnd, LeaseEnded, LoadEnded
from tests.support.scripted_connector import ScriptedConnector

NUM_VALUES = 5
GARBAGE = -1


def kv_values(token_ids: Sequence[int]) -> list[int]:
    """The KV of each position: a number that stands for all tokens up to it."""
    values: list[int] = []
    value = 17
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % (1 << 61)
        values.append(value)
    return values


def next_token(value: int) -> int:
    """The token that follows a context."""
    return (value >> 20) % NUM_VALUES


def undisturbed_output(request: GenerateRequest, max_total_tokens: int) -> list[int]:
    """All output tokens of a request that nothing disturbs, those that it brought along included."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
    tokens = list(request.prompt_token_ids)
    output = list(request.output_token_ids)
    while len(output) < sampling.max_tokens and len(tokens) + len(output) < max_total_tokens:
        if output and output[-1] in stops and len(output) >= sampling.min_tokens:
            break
        output.append(next_token(kv_values(tokens + output)[-1]))
    return output


@dataclass(slots=True)
class RunnerRow:
    """The runner's own copy of a row."""

    token_ids: list[int]
    block_ids: list[int]


class StrictRunner:
    """Applies every step exactly, and fails where the step does not follow the rules of ``SchedulerOutput``."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.kv = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, RunnerRow] = {}
        self.num_computed_positions = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        self._apply(output)
        firsts, counts = output.first_positions.tolist(), output.num_scheduled_tokens.tolist()
        for row, first, count in zip(output.rows.tolist(), firsts, counts, strict=True):
            assert count >= 1
            self._write(self.rows[row], first, first + count)
        sampled = [
            self._sample(self.rows[row], first + count) if is_sampling else GARBAGE
            for row, first, count, is_sampling in zip(
                output.rows.tolist(), firsts, counts, output.is_sampling.tolist(), strict=True
            )
        ]
        return ModelRunnerOutput(sampled_token_ids=np.array(sampled, np.int32))

    def content(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The KV in a block table."""
        return [self.kv[block_ids[p // self._block_size]][p % self._block_size] for p in range(num_tokens)]

    def fill(self, block_ids: Sequence[int], first_block: int, values: Sequence[int]) -> None:
        """Write ``values``, the KV of a prompt, into blocks that stand from its ``first_block``-th block on."""
        for offset, block_id in enumerate(block_ids):
            start = (first_block + offset) * self._block_size
            part = values[start : start + self._block_size]
            self.kv[block_id] = [*part, *[GARBAGE] * (self._block_size - len(part))]

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with what is nobody's KV."""
        for block_id in block_ids:
            self.kv[block_id] = [GARBAGE] * self._block_size

    def _apply(self, output: SchedulerOutput) -> None:
        for row in output.released_rows.tolist():
            del self.rows[row]
        for new_row in output.new_rows:
            self._start(new_row)
        columns, block_ids = output.append_columns.tolist(), output.append_block_ids.tolist()
        for row, column, block_id in zip(output.append_rows.tolist(), columns, block_ids, strict=True):
            assert column == len(self.rows[row].block_ids), "blocks are appended in order"
            self.rows[row].block_ids.append(block_id)
        assert len(set(output.rows.tolist())) == output.rows.size, "a row computes once a step"

    def _start(self, new_row: NewRow) -> None:
        assert 0 <= new_row.row < self._max_num_seqs
        assert new_row.row not in self.rows, "a row must be released before it is used again"
        self.rows[new_row.row] = RunnerRow(new_row.token_ids.tolist(), new_row.block_ids.tolist())

    def _write(self, row: RunnerRow, first: int, end: int) -> None:
        assert end <= len(row.token_ids), "only known tokens can be computed"
        assert end <= len(row.block_ids) * self._block_size, "every position needs its block"
        values = kv_values(row.token_ids[:end])
        for position in range(first, end):
            block = self.kv[row.block_ids[position // self._block_size]]
            block[position % self._block_size] = values[position]
        self.num_computed_positions += end - first
        assert self.content(row.block_ids, end) == values, "attended to KV that is not this context's (I3)"

    def _sample(self, row: RunnerRow, end: int) -> int:
        assert end == len(row.token_ids), "only the successor of the last known token can be sampled"
        token = next_token(self.kv[row.block_ids[(end - 1) // self._block_size]][(end - 1) % self._block_size])
        row.token_ids.append(token)
        return token


@dataclass(slots=True)
class Ending:
    """What became of a request: the tokens it got here, and its last delta."""

    token_ids: list[int] = field(default_factory=list)
    last: TokenDelta | None = None
    num_cached_tokens: int | None = None
    num_remote_tokens: int | None = None


class SchedulerWorld:
    """One scheduler, its runner and its peer, driven by hand. Every delta is collected, every step checked."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        has_connector: bool = True,
    ) -> None:
        self.now_s = 0.0
        self.config = config
        self.max_total_tokens = min(max_model_len, num_blocks * block_size + 1)
        self.block_size = block_size
        self.connector = ScriptedConnector(block_size=block_size)
        self.scheduler = Scheduler(
            config,
            CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            connector=self.connector if has_connector else None,
            clock=lambda: self.now_s,
        )
        self.runner = StrictRunner(num_blocks=num_blocks, block_size=block_size, max_num_seqs=config.max_num_seqs)
        self.requests: dict[str, GenerateRequest] = {}
        self._endings: dict[str, Ending] = {}
        self.in_flight: deque[SchedulerOutput] = deque()
        self.finished_ids: list[str] = []
        self.last_output: SchedulerOutput | None = None

    @property
    def endings(self) -> MappingProxyType[str, Ending]:
        """What each request got so far."""
        return MappingProxyType(self._endings)

    def add(self, request: GenerateRequest) -> None:
        """Add a request; refusals pass through."""
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self._endings[request.request_id] = Ending()
        self.collect(self.scheduler.take_news())

    def schedule(self) -> SchedulerOutput:
        """Schedule a step; it stays in flight until ``complete_step``, unless it is empty."""
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.config.max_num_batched_tokens
        assert output.rows.size <= self.config.max_num_seqs
        self.connector.take_in(output.connector_orders)
        self.finished_ids.extend(output.finished_request_ids)
        self.last_output = output
        self.in_flight.append(output)
        return output

    def complete_step(self) -> StepResult:
        """Run the oldest step in flight and give its result back."""
        output = self.in_flight.popleft()
        result = self.scheduler.update(output, self.runner.execute(output))
        self.collect(result)
        return result

    def step(self) -> SchedulerOutput:
        """Schedule a step, run it, update."""
        output = self.schedule()
        while self.in_flight:
            self.complete_step()
        return output

    def run(self, *, max_steps: int = 2000) -> None:
        """Step while there is work."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"still at work after {max_steps} steps")

    def abort(self, request_id: str) -> bool:
        """Abort, and collect what that ended."""
        was_known = self.scheduler.abort(request_id)
        self.collect(self.scheduler.take_news())
        return was_known

    def end_load(self, request_id: str, failed: Sequence[int] = ()) -> None:
        """End a load: what it brought is written now; ``failed`` are offsets into its destination."""
        load = self.connector.open_loads.pop(request_id)
        values = kv_values(load.prompt_token_ids)
        self.runner.fill(load.block_ids, load.first_block, values)
        failed_ids = tuple(load.block_ids[offset] for offset in failed)
        self.runner.spoil(failed_ids)
        ended = LoadEnded(
            request_id=request_id,
            failed_block_ids=failed_ids,
            num_bytes=len(load.block_ids),
            duration_s=0.0,
            error="the read failed" if failed_ids else None,
        )
        self.handle(ConnectorEvents(loads=(ended,)))

    def stall_load(self, request_id: str) -> None:
        """Report that a load ran out of time; it still has not ended."""
        self.handle(ConnectorEvents(stalled=(request_id,)))

    def announce(self, request: GenerateRequest) -> None:
        """Tell the scheduler of a request that is to come; refusals pass through."""
        assert request.kv_stream is not None
        self.scheduler.add_request(request)
        assert self.scheduler.take_news().is_empty

    def begin_early_read(self, stream_id: str) -> None:
        """A read of a stream is under way from now on; it writes when it ends."""
        self.connector.open_streams[stream_id].is_reading = True

    def end_early_read(self, stream_id: str) -> None:
        """It ends: nobody knows yet what it brought, so it brings garbage."""
        stream = self.connector.open_streams[stream_id]
        stream.is_reading = False
        self.runner.spoil(stream.block_ids)
        if stream.is_cancelled:
            del self.connector.open_streams[stream_id]
            self.handle(ConnectorEvents(ended_streams=(stream_id,)))

    def end_lease(self, lease_id: str, reason: LeaseEnd = LeaseEnd.DONE) -> None:
        """End a lease, after checking that its blocks still hold the prompt's KV."""
        lease = self.connector.open_leases.pop(lease_id)
        prompt = self.requests[lease.request_id].prompt_token_ids
        assert len(prompt) == lease.num_tokens
        assert self.runner.content(lease.block_ids, lease.num_tokens) == kv_values(prompt), "leased KV was overwritten"
        self.handle(
            ConnectorEvents(leases=(LeaseEnded(request_id=lease.request_id, lease_id=lease_id, reason=reason),))
        )

    def handle(self, events: ConnectorEvents) -> None:
        """Hand events to the scheduler, and collect what they ended."""
        self.scheduler.handle_connector_events(events)
        self.collect(self.scheduler.take_news())

    def collect(self, result: StepResult) -> None:
        """Note every delta; a request says nothing after its end."""
        for client_id, deltas in result.deltas_by_client().items():
            for delta in deltas:
                assert self.requests[delta.request_id].client_id == client_id
                self._note(delta)

    def _note(self, delta: TokenDelta) -> None:
        ending = self._endings[delta.request_id]
        assert ending.last is None, f"{delta.request_id} said something after its end (I4)"
        if not ending.token_ids and delta.token_ids:
            assert delta.num_cached_tokens is not None
        if delta.num_cached_tokens is not None:
            assert ending.num_cached_tokens is None, "set on the first delta only"
            ending.num_cached_tokens, ending.num_remote_tokens = delta.num_cached_tokens, delta.num_remote_tokens
        ending.token_ids.extend(delta.token_ids)
        if delta.finish_reason is None:
            return
        ending.last = delta

    def check_output(self, request_id: str) -> None:
        """Compare what a request got with what it gets undisturbed (I1)."""
        request, ending = self.requests[request_id], self._endings[request_id]
        expected = undisturbed_output(request, self.max_total_tokens)[len(request.output_token_ids) :]
        assert ending.last is not None
        if ending.last.finish_reason is FinishReason.HANDED_OVER:
            assert ending.token_ids == expected[:1]
        elif ending.last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert ending.token_ids == expected[: len(ending.token_ids)]
        else:
            assert ending.token_ids == expected
