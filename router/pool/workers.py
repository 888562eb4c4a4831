"""The router's interface to workers: Protocols that ``cluster/`` implements over Ray, and tests with plain objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.messages import CacheReset, GenerateRequest, LoadReport, StepMessage, WorkerInfo
from kv_transfer.fault_options import FaultOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica's answer to a status call. ``info`` is None until the replica introduced itself."""

    replica_id: str
    node_ip: str
    pid: int
    state: str
    info: WorkerInfo | None
    load: LoadReport | None


class WorkerError(Exception):
    """Base class of errors that calls to a worker raise."""


class WorkerUnavailableError(WorkerError):
    """The replica is gone or does not answer; the request may be tried elsewhere.

    ``was_called`` is False if it was gone before the call, for example because it was drained after it was chosen. Then
    nothing has begun there, and nothing is lost.
    """

    def __init__(self, *, replica_id: str, reason: str, was_called: bool = True) -> None:
        super().__init__(f"worker {replica_id} is unavailable: {reason}")
        self.replica_id = replica_id
        self.reason = reason
        self.was_called = was_called


class StreamNotBegunError(WorkerUnavailableError):
    """The replica's token stream did not begin, so the request was not sent there."""


class WorkerRefusedError(WorkerError):
    """The engine refused the request. ``code`` is the engine's; see ``is_retryable`` in router.wire.worker_errors."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerPool(Protocol):
    """The workers of one role. For each replica, one stream brings the tokens of all requests of a client."""

    def replica_ids(self) -> Sequence[str]:
        """The replicas that can be addressed now, without a network call."""

    def has_link(self, replica_id: str) -> bool:
        """True if calls go as frames over an open connection, so that batching calls gains nothing."""

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """Ask one replica for its constants and its load.

        Raises:
            WorkerUnavailableError: No answer within ``timeout_s``.
        """

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests in whatever state they are; unknown ids are ignored."""

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Have requests leave a replica as soon as they can, each with a hand-over. Unknown ids are ignored, and so are
        requests that have begun if ``only_waiting``.

        Raises:
            WorkerUnavailableError: It does not answer.
        """

    async def drain(self, replica_id: str) -> None:
        """Have a replica release its requests, and exit. Returns at once.

        Raises:
            WorkerUnavailableError: It does not answer.
        """

    async def lean(self, replica_id: str, role: str) -> str:
        """Have a replica prefer the work of a role; what runs there goes on.

        Returns:
            The role that it leaned to before.

        Raises:
            WorkerUnavailableError: It does not answer.
        """

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """Inject exactly these faults into a replica's connector.

        Raises:
            WorkerRefusedError: The cluster allows no faults.
            WorkerUnavailableError: It does not answer.
        """

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Have a replica drop its prefix cache; with ``preempt_running`` it preempts all its running requests first.

        Returns:
            What was dropped; None if nothing was, because requests hold blocks and may not be preempted.

        Raises:
            WorkerUnavailableError: It does not answer.
        """

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests to an engine; their tokens arrive on ``outputs``. One answer a request, in order.

        Raises:
            WorkerUnavailableError: The replica is gone or does not answer.
        """

    def outputs(self, replica_id: str, client_id: str, *, mirrors_cache: bool = False) -> AsyncIterator[StepMessage]:
        """Open the stream of all messages for ``client_id``: one a step, and one a report period while idle. Closing it
        aborts that client's requests. ``mirrors_cache`` asks for changes of the prefix cache.

        On a prefill worker each request has one delta: with ``kv_transfer`` and ``FinishReason.HANDED_OVER`` if a
        decode worker must continue, or with the reason why the request ended right there.

        Raises:
            WorkerUnavailableError: From the iterator: the replica died.
        """

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """Ask that the next message of a stream holds the whole prefix cache.

        Raises:
            WorkerUnavailableError: The replica is gone or does not answer.
        """
