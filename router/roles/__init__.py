"""The roles of a cluster by name, in display order, and which of them are for which work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from decode.role import DECODE
from engine.contract.role import Role, Work
from prefill.role import PREFILL
from router.roles.mixed import MIXED

ROLES: Mapping[str, Role] = {role.name: role for role in (PREFILL, DECODE, MIXED)}


def role_named(name: str) -> Role:
    """The role with this name. A name that is not known here, as of a newer worker, counts as a role for streams."""
    return ROLES.get(name) or role_for(Work.STREAM)


def role_for(work: Work) -> Role:
    """The first role that is for this kind of work alone."""
    return next(role for role in ROLES.values() if role.prefers == (work,))


def roles_met_by(role: Role, pools: Iterable[str]) -> list[Role]:
    """The roles of other pools whose workers exchange KV with those of this one, elastic if this one is; ``role`` may
    be a copy from another process."""
    others = [ROLES[name].elastic() if role.is_elastic else ROLES[name] for name in pools if name != role.name]
    return [other for other in others if role.meets(other)]


def groups_of_roles(names: Iterable[str], *, is_elastic: bool) -> Sequence[Sequence[Role]]:
    """The roles in groups, each of which shares its work among its workers.

    All are one group if any worker takes any work, or if some role is for both kinds. Otherwise there is a group for
    each kind.
    """
    roles = [ROLES[name] for name in names]
    if is_elastic or any(len(role.prefers) > 1 for role in roles):
        return [roles]
    return [found for work in Work if (found := [role for role in roles if work in role.prefers])]
