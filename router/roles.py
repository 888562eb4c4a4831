"""The roles of a cluster by name, in display order."""

from __future__ import annotations

from collections.abc import Mapping

from decode.role import DECODE
from engine.contract.role import Role
from prefill.role import PREFILL

ROLES: Mapping[str, Role] = {role.name: role for role in (PREFILL, DECODE)}


def roles_met_by(role: Role) -> list[Role]:
    """The other roles whose workers exchange KV with those of this one; ``role`` may be a copy from another process."""
    return [other for other in ROLES.values() if other.name != role.name and role.meets(other)]
