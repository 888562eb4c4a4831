"""Sends requests, aborts and orders to move over the connection that brings a replica's tokens, with the errors of Ray
calls; and makes the links to all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from engine.contract.call_frame import Abort, Answer, CallError, Move, Submit, pack_call, unpack_answer
from engine.contract.messages import GenerateRequest
from engine.contract.role import Role, Work
from router.pool.pool import ReplicaPool
from router.pool.role_view import RoleReplicas, RoleView
from router.pool.united_workers import UnitedWorkers
from router.pool.workers import WorkerPool, WorkerRefusedError, WorkerUnavailableError
from router.roles import ROLES, groups_of_roles
from router.settings import RouterSettings
from router.wire.frame_link import FrameLink, LinkBrokenError
from router.wire.worker_link import WorkerLink


def make_links(
    workers: Mapping[str, WorkerPool], *, settings: RouterSettings, clock: Callable[[], float]
) -> Mapping[str, WorkerLink]:
    """The links by role, each to the workers that were started with that role; roles that share work share a link."""

    def link(roles: Sequence[Role], workers: WorkerPool) -> WorkerLink:
        role, *others = roles
        pool = ReplicaPool(
            role,
            workers,
            policy=settings.policy_of(role),
            settings=settings,
            mirrors_cache=any(map(settings.mirrors_cache, roles)),
            clock=clock,
            also={other: settings.policy_of(other) for other in others},
        )
        return WorkerLink(workers, pool, settings=settings, clock=clock)

    found: dict[str, WorkerLink] = {}
    for roles in groups_of_roles(workers, is_elastic=settings.is_elastic):
        names = [role.name for role in roles]
        members = {name: workers[name] for name in names}
        found.update(dict.fromkeys(names, link(roles, UnitedWorkers(members) if len(names) > 1 else members[names[0]])))
    return {name: found[name] for name in workers}


def link_for(links: Mapping[str, WorkerLink], work: Work) -> WorkerLink:
    """The link to the workers that are for this kind of work."""
    return next(link for name, link in links.items() if work in ROLES[name].prefers)


def role_views(links: Mapping[str, WorkerLink]) -> Sequence[RoleReplicas]:
    """Views of the replicas by the roles that they were started with, for reports and operators."""
    views: list[RoleReplicas] = []
    for role, link in links.items():
        pool, workers = link.pool, link.pool.workers
        views.append(RoleView(pool, role, workers.members[role]) if isinstance(workers, UnitedWorkers) else pool)
    return tuple(views)


class LinkedCalls:
    """Calls over one connection, which brings the tokens of ``client_id``.

    A call without an answer may have been carried out, so it is never sent again, here or by another way.
    """

    def __init__(self, replica_id: str, client_id: str, link: FrameLink) -> None:
        self._replica_id = replica_id
        self._client_id = client_id
        self._link = link

    def packed(self, requests: Sequence[GenerateRequest]) -> bytes | None:
        """The call that submits these requests; None if they cannot go over this connection. A request of an earlier
        connection cannot, since it must end with that one; nor can integers above 64 bits, which MessagePack lacks.
        """
        if any(request.client_id != self._client_id for request in requests):
            return None
        try:
            return pack_call(Submit(tuple(requests)))
        except CallError:
            return None

    async def submit(self, call: bytes, *, timeout_s: float) -> list[WorkerRefusedError | None]:
        """The engine's answers, one a request, in order; raises WorkerUnavailableError."""
        answer = await self._ask("submit", call, timeout_s=timeout_s)
        return [
            WorkerRefusedError(refusal.message, code=refusal.code) if refusal is not None else None
            for refusal in answer.refusals
        ]

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float) -> None:
        """End requests; raises WorkerUnavailableError."""
        await self._ask("abort", pack_call(Abort(tuple(request_ids))), timeout_s=timeout_s)

    async def move_out(self, request_ids: Sequence[str], *, timeout_s: float, only_waiting: bool = False) -> None:
        """Have requests leave for another worker; raises WorkerUnavailableError."""
        await self._ask("move", pack_call(Move(tuple(request_ids), only_waiting)), timeout_s=timeout_s)

    async def _ask(self, what: str, call: bytes, *, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                answer = unpack_answer(await self._link.call(call))
        except TimeoutError as error:
            reason = f"no answer to {what} within {timeout_s:g} s"
            raise WorkerUnavailableError(replica_id=self._replica_id, reason=reason) from error
        except (LinkBrokenError, CallError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise WorkerUnavailableError(replica_id=self._replica_id, reason=reason) from error
        if answer.failure is not None:
            raise WorkerUnavailableError(replica_id=self._replica_id, reason=answer.failure)
        return answer
