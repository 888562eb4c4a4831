"""Fake pools of workers: they produce tokens by a rule instead of a model, and fail, hang or refuse on request.

They keep the books that real workers keep (running requests, leases), so that a test can ask whether anything stayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from engine.contract.messages import (
    CacheReset,
    FinishReason,
    GenerateRequest,
    RequestError,
    SamplingParams,
    StepMessage,
    TokenDelta,
    WorkerInfo,
)
from kv_transfer.fault_options import FaultOptions
from kv_transfer.params import KVTransferParams, PeerIdentity
from router.pool.workers import ReplicaStatus, WorkerRefusedError, WorkerUnavailableError
from tests.support.router.fake_logprobs import with_logprobs
from tests.support.router.fake_replica import FakeReplica

REPORT_PERIOD_S = 0.02

NextToken = Callable[[GenerateRequest, int], int]
"""The token at an output position of a request."""


def counting(request: GenerateRequest, position: int) -> int:
    """Tokens that depend on the prompt, the seed and the position, and on nothing else."""
    return 40 + (sum(request.prompt_token_ids) + 7 * request.sampling.seed + 3 * position) % 200


def scripted(token_ids: Sequence[int]) -> NextToken:
    """The same tokens for every request, over and over."""
    return lambda _, position: token_ids[position % len(token_ids)]


def finish_of(sampling: SamplingParams, token: int, num_output_tokens: int) -> FinishReason | None:
    """How a request ends after a token, if it does."""
    stops = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids + sampling.eos_token_ids
    if token in stops and num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= sampling.max_tokens else None


class _FakePool:
    """The common part of both fake pools."""

    role = ""

    def __init__(self, num_replicas: int, *, max_model_len: int, vocab_size: int) -> None:
        self.replicas = {
            f"{self.role}-{index}": FakeReplica(replica_id=f"{self.role}-{index}") for index in range(num_replicas)
        }
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.hidden: set[str] = set()
        self.drained: list[str] = []
        self.leanings: dict[str, str] = {}
        self.allows_faults = True
        self.is_linked = False
        self.faults: dict[str, FaultOptions] = {}
        self._queues: dict[tuple[str, str], asyncio.Queue[StepMessage | None]] = {}

    def __getitem__(self, index: int) -> FakeReplica:
        return list(self.replicas.values())[index]

    def add(self, replica_id: str) -> FakeReplica:
        """Add a replica."""
        self.replicas[replica_id] = FakeReplica(replica_id=replica_id)
        return self.replicas[replica_id]

    def replica_ids(self) -> Sequence[str]:
        """The replicas that can be addressed now."""
        return [name for name in self.replicas if name not in self.hidden]

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """Constants and load."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.status_gate.wait()
        info = WorkerInfo(
            role=self.role,
            engine_id=replica_id,
            incarnation="1",
            node_ip="127.0.0.1",
            pid=1000 + len(replica_id),
            model_name="tiny",
            block_size=16,
            num_blocks=replica.num_blocks,
            block_bytes=4096,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            device="cpu",
            dtype="float32",
        )
        return ReplicaStatus(
            replica_id=replica_id, node_ip="127.0.0.1", pid=info.pid, state="running", info=info, load=replica.load()
        )

    async def outputs(
        self, replica_id: str, client_id: str, *, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """The stream of one client."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.stream_gate.wait()
        queue: asyncio.Queue[StepMessage | None] = asyncio.Queue()
        self._queues[replica_id, client_id] = queue
        try:
            yield StepMessage(deltas=(), load=replica.load())
            while (message := await self._next_message(replica, queue)) is not None:
                yield message
            raise WorkerUnavailableError(replica_id=replica_id, reason="killed by the test")
        finally:
            del self._queues[replica_id, client_id]
            for request in [item for item in replica.running.values() if item.client_id == client_id]:
                replica.running.pop(request.request_id, None)

    @staticmethod
    async def _next_message(replica: FakeReplica, queue: asyncio.Queue[StepMessage | None]) -> StepMessage | None:
        """The next step's message, or the report of an idle period; a replica that hangs reports nothing."""
        while True:
            try:
                async with asyncio.timeout(REPORT_PERIOD_S):
                    return await queue.get()
            except TimeoutError:
                if replica.gate.is_set() and replica.submit_gate.is_set():
                    return StepMessage(deltas=(), load=replica.load())

    def _send(self, replica: FakeReplica, client_id: str, deltas: Sequence[TokenDelta]) -> bool:
        """Send one message; False when the client has no stream."""
        queue = self._queues.get((replica.replica_id, client_id))
        if queue is not None:
            queue.put_nowait(StepMessage(deltas=tuple(deltas), load=replica.load()))
        return queue is not None

    async def drain(self, replica_id: str) -> None:
        """Note the order."""
        self.replicas[replica_id].check_alive()
        self.drained.append(replica_id)

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Drop the blocks that the replica pretends to have cached, unless requests hold blocks."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.answer_gate.wait()
        if replica.running and not preempt_running:
            return None
        num_blocks, replica.num_cached_tokens = replica.num_cached_tokens // 16, 0
        return CacheReset(num_blocks=num_blocks, num_preempted=len(replica.running))

    async def lean(self, replica_id: str, role: str) -> str:
        """Report another leaning."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        before = str(replica.gauges.get("leaning", self.role))
        replica.gauges["leaning"] = self.leanings[replica_id] = role
        return before

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """Note the order, or refuse it."""
        self.replicas[replica_id].check_alive()
        if not self.allows_faults:
            raise WorkerRefusedError("this cluster does not allow faults", code="faults_not_allowed")
        self.faults[replica_id] = options

    def has_link(self, replica_id: str) -> bool:
        """False unless a test changes it: calls take time, as those over Ray do."""
        return self.is_linked

    def has_stream(self, replica_id: str) -> bool:
        """True if some router listens to the replica."""
        return any(name == replica_id for name, _ in self._queues)

    def kill(self, replica_id: str) -> None:
        """The replica dies: its streams break, its calls fail, its requests are gone."""
        replica = self.replicas[replica_id]
        replica.is_dead = True
        replica.running.clear()
        for (name, _), queue in self._queues.items():
            if name == replica_id:
                queue.put_nowait(None)

    def revive(self, replica_id: str) -> None:
        """The replica is back, without any state."""
        self.replicas[replica_id].is_dead = False


class FakePrefillPool(_FakePool):
    """Prefill workers: the first token, then a lease."""

    role = "prefill"

    def __init__(
        self,
        num_replicas: int = 1,
        *,
        next_token: NextToken = counting,
        max_model_len: int = 512,
        vocab_size: int = 400,
    ) -> None:
        super().__init__(num_replicas, max_model_len=max_model_len, vocab_size=vocab_size)
        self.next_token = next_token
        self._computing: set[asyncio.Task[None]] = set()

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add prompts."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        replica.seen.extend(requests)
        if replica.refuse_code is not None:
            return [WorkerRefusedError("refused by the test", code=replica.refuse_code) for _ in requests]
        for request in requests:
            replica.running[request.request_id] = request
            task = asyncio.create_task(self._compute(replica, request))
            self._computing.add(task)
            task.add_done_callback(self._computing.discard)
        await replica.answer_gate.wait()
        return [None] * len(requests)

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests and leases."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.abort_gate.wait()
        replica.aborted.extend(request_ids)
        for request_id in request_ids:
            replica.running.pop(request_id, None)
            replica.leases.discard(request_id)

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Let waiting requests go; the others hand over anyway."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.order_gate.wait()
        for request_id in request_ids if only_waiting else ():
            if (request := replica.running.pop(request_id, None)) is not None:
                self._send(replica, request.client_id, [TokenDelta(request_id, (), FinishReason.HANDED_OVER)])

    async def _compute(self, replica: FakeReplica, request: GenerateRequest) -> None:
        await replica.gate.wait()
        if replica.is_dead:
            self.kill(replica.replica_id)
        elif replica.running.pop(request.request_id, None) is not None:
            delta = with_logprobs(self._first_delta(replica, request), request, is_first=True)
            self._send(replica, request.client_id, [delta])

    def _first_delta(self, replica: FakeReplica, request: GenerateRequest) -> TokenDelta:
        request_id = request.request_id
        if replica.error_code is not None:
            error = RequestError(code=replica.error_code, message="failed by the test")
            return TokenDelta(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error)
        token = self.next_token(request, 0)
        replica.num_tokens += 1
        reason = finish_of(request.sampling, token, 1)
        if reason is not None or not request.hand_over:
            stop = token if reason is FinishReason.STOP else None
            return TokenDelta(
                request_id=request_id,
                token_ids=(token,),
                finish_reason=reason,
                stop_token_id=stop,
                num_cached_tokens=replica.num_cached_tokens,
            )
        replica.leases.add(request_id)
        params = KVTransferParams(
            protocol_version=1,
            source=PeerIdentity(engine_id=replica.replica_id, incarnation="1"),
            lease_id=f"lease-{request_id}",
            layout_hash="fake",
            block_ids=((0,),),
            num_tokens=len(request.prompt_token_ids),
        )
        return TokenDelta(
            request_id=request_id,
            token_ids=(token,),
            finish_reason=FinishReason.HANDED_OVER,
            kv_transfer=params,
            num_cached_tokens=replica.num_cached_tokens,
        )


class FakeDecodePool(_FakePool):
    """Decode workers: one token a step for every request, one message a step for every client."""

    role = "decode"

    def __init__(
        self,
        num_replicas: int = 1,
        *,
        prefill: FakePrefillPool,
        next_token: NextToken | None = None,
        max_model_len: int = 512,
        vocab_size: int = 400,
        tokens_per_step: int = 1,
    ) -> None:
        super().__init__(num_replicas, max_model_len=max_model_len, vocab_size=vocab_size)
        self.prefill = prefill
        self.next_token = next_token or prefill.next_token
        self.tokens_per_step = tokens_per_step
        self._progress: dict[tuple[str, str], int] = {}
        self._stepping: dict[str, asyncio.Task[None]] = {}

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests; a request with transfer parameters reads its KV at once, which ends the lease."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.submit_gate.wait()
        answers: list[WorkerRefusedError | None] = []
        for request in requests:
            replica.seen.append(request)
            if replica.refuse_code is not None:
                answers.append(WorkerRefusedError("refused by the test", code=replica.refuse_code))
                continue
            if (params := request.kv_transfer) is not None:
                self.prefill.replicas[params.source.engine_id].leases.discard(params.lease_id.removeprefix("lease-"))
            replica.running[request.request_id] = request
            self._progress[replica_id, request.request_id] = len(request.output_token_ids)
            answers.append(None)
        if replica_id not in self._stepping:
            self._stepping[replica_id] = asyncio.create_task(self._step_until_idle(replica))
        return answers

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.abort_gate.wait()
        replica.aborted.extend(request_ids)
        for request_id in request_ids:
            replica.running.pop(request_id, None)

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Let requests go, without their KV; unknown ids are ignored."""
        replica = self.replicas[replica_id]
        replica.check_alive()
        await replica.order_gate.wait()
        replica.moved.extend(request_ids)
        for request_id in request_ids:
            if (request := replica.running.pop(request_id, None)) is not None:
                self._send(replica, request.client_id, [TokenDelta(request_id, (), FinishReason.HANDED_OVER)])

    async def _step_until_idle(self, replica: FakeReplica) -> None:
        try:
            while replica.running:
                await asyncio.sleep(0)
                await replica.gate.wait()
                await replica.step_gate.wait()
                self._step(replica)
        finally:
            del self._stepping[replica.replica_id]

    def _step(self, replica: FakeReplica) -> None:
        by_client: dict[str, list[TokenDelta]] = {}
        for request in list(replica.running.values()):
            is_first = not request.output_token_ids and not self._progress[replica.replica_id, request.request_id]
            delta = with_logprobs(self._advance(replica, request), request, is_first=is_first)
            by_client.setdefault(request.client_id, []).append(delta)
            if delta.finish_reason is not None:
                del replica.running[request.request_id]
        for client_id, deltas in by_client.items():
            self._send(replica, client_id, deltas)
        if replica.die_after_tokens is not None and replica.num_tokens >= replica.die_after_tokens:
            replica.die_after_tokens = None
            self.kill(replica.replica_id)

    def _advance(self, replica: FakeReplica, request: GenerateRequest) -> TokenDelta:
        key = (replica.replica_id, request.request_id)
        if replica.lost_loads and request.max_recomputed_tokens == 0:
            replica.lost_loads -= 1
            lost = RequestError(code="kv_lost", message="lost by the test")
            return TokenDelta(request_id=request.request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=lost)
        if replica.error_code is not None:
            error = RequestError(code=replica.error_code, message="failed by the test")
            return TokenDelta(
                request_id=request.request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error
            )
        tokens: list[int] = []
        reason: FinishReason | None = None
        while len(tokens) < self.tokens_per_step and reason is None:
            tokens.append(self.next_token(request, self._progress[key]))
            self._progress[key] += 1
            reason = finish_of(request.sampling, tokens[-1], self._progress[key])
        replica.num_tokens += len(tokens)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=tuple(tokens),
            finish_reason=reason,
            stop_token_id=tokens[-1] if reason is FinishReason.STOP else None,
        )
