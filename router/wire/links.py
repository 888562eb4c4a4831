"""Which link leads to the workers of which role: one each, or one to all where roles are elastic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.contract.role import Role
from router.pool.pool import ReplicaPool
from router.pool.role_view import RoleReplicas, RoleView
from router.pool.united_workers import UnitedWorkers
from router.pool.workers import WorkerPool
from router.roles import ROLES
from router.settings import RouterSettings
from router.wire.worker_link import WorkerLink


def make_links(
    workers: Mapping[str, WorkerPool], *, settings: RouterSettings, clock: Callable[[], float]
) -> Mapping[str, WorkerLink]:
    """The links by role, to the workers that were started with each."""

    def link(roles: Sequence[Role], workers: WorkerPool) -> WorkerLink:
        role, *others = roles
        pool = ReplicaPool(
            role,
            workers,
            policy=settings.policy_of(role),
            settings=settings,
            mirrors_cache=settings.mirrors_cache(role),
            clock=clock,
            also={other: settings.policy_of(other) for other in others},
        )
        return WorkerLink(workers, pool, settings=settings, clock=clock)

    if settings.is_elastic:
        return dict.fromkeys(workers, link([ROLES[name] for name in workers], UnitedWorkers(workers)))
    return {name: link((ROLES[name],), of_role) for name, of_role in workers.items()}


def role_views(links: Mapping[str, WorkerLink]) -> Sequence[RoleReplicas]:
    """The replicas by the roles that they were started with, for reports and operators."""
    views: list[RoleReplicas] = []
    for role, link in links.items():
        pool, workers = link.pool, link.pool.workers
        views.append(RoleView(pool, role, workers.members[role]) if isinstance(workers, UnitedWorkers) else pool)
    return tuple(views)
