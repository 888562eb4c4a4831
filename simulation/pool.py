"""The router's view of virtual workers: calls take virtual time in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from engine.contract.messages import CacheReset, GenerateRequest, StepMessage
from kv_transfer.fault_options import FaultOptions
from router.pool.workers import ReplicaStatus, WorkerRefusedError, WorkerUnavailableError
from router.roles import ROLES
from simulation.machine import RouterModel
from simulation.worker import VirtualWorker, WorkerGoneError


class VirtualPool:
    """Implements ``WorkerPool`` for the workers of one role. ``moves_out``: live requests leave a draining worker."""

    def __init__(self, workers: Mapping[str, VirtualWorker], model: RouterModel, *, moves_out: bool) -> None:
        self.workers = dict(workers)
        self._model = model
        self._moves_out = moves_out

    def replica_ids(self) -> Sequence[str]:
        """The ids of the workers that exist now."""
        return [name for name, worker in self.workers.items() if not worker.is_gone]

    def has_link(self, replica_id: str) -> bool:  # noqa: ARG002
        """There is no gain from batching calls."""
        return True

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:  # noqa: ARG002
        """Constants and load.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        worker = await self._reach(replica_id)
        return ReplicaStatus(
            replica_id=replica_id,
            node_ip=worker.info.node_ip,
            pid=1,
            state="running",
            info=worker.info,
            load=worker.load,
        )

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests between two of the worker's steps.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        worker = await self._reach(replica_id)
        try:
            answers = await worker.submit(requests)
        except WorkerGoneError as error:
            raise _gone(replica_id, error) from error
        await self._travel()
        return [None if answer is None else WorkerRefusedError(str(answer), code=answer.code) for answer in answers]

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        worker = await self._reach(replica_id)
        try:
            await worker.abort(request_ids)
        except WorkerGoneError as error:
            raise _gone(replica_id, error) from error

    async def outputs(
        self, replica_id: str, client_id: str, *, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """The stream of one router. Each message takes a while to arrive.

        Raises:
            WorkerUnavailableError: The worker is gone. Raised by the iterator.
        """
        worker = await self._reach(replica_id)
        messages = worker.outputs(client_id, mirrors_cache=mirrors_cache)
        try:
            async for message in messages:
                yield message
        except WorkerGoneError as error:
            raise _gone(replica_id, error) from error
        finally:
            await self._travel()  # behind the calls that were made before
            await messages.aclose()  # type: ignore[attr-defined]  # the worker's iterator is a generator

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """Let the worker report its whole prefix cache again.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        (await self._reach(replica_id)).resync_cache(client_id)

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Drop the worker's prefix cache.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        worker = await self._reach(replica_id)
        try:
            return await worker.reset_prefix_cache(preempt_running=preempt_running)
        except WorkerGoneError as error:
            raise _gone(replica_id, error) from error

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Let requests move to another replica.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        worker = await self._reach(replica_id)
        try:
            await worker.move_out(request_ids, only_waiting=only_waiting)
        except WorkerGoneError as error:
            raise _gone(replica_id, error) from error

    async def lean(self, replica_id: str, role: str) -> str:
        """Let a replica prefer the work of a role. Returns the role that it preferred before.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        return (await self._reach(replica_id)).lean(ROLES[role])

    async def drain(self, replica_id: str) -> None:
        """Let the worker drain its requests, and end.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        await (await self._reach(replica_id)).drain(moves_out=self._moves_out)

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """Inject exactly these faults into the loads of a worker; only those of reads and leases have an effect.

        Raises:
            WorkerUnavailableError: It is gone.
        """
        (await self._reach(replica_id)).transfers.faults.change(options)

    async def _travel(self) -> None:
        await asyncio.sleep(self._model.call_s)

    async def _reach(self, replica_id: str) -> VirtualWorker:
        """A worker, once a call has arrived there and its process takes it."""
        await self._travel()
        worker = self.workers[replica_id]
        await worker.process.running()
        try:
            worker.check()
        except WorkerGoneError as error:
            raise _gone(replica_id, error) from error
        return worker


def _gone(replica_id: str, error: WorkerGoneError) -> WorkerUnavailableError:
    return WorkerUnavailableError(replica_id=replica_id, reason=str(error), was_called=error.was_killed)
