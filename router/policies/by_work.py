"""The policies of a pool, one for each kind of work that its replicas are chosen for."""

from __future__ import annotations

from collections.abc import Mapping

from engine.contract.role import Role, Work
from router.policies import PREFIX, Policy, make_policy


class PoliciesByWork:
    """For each kind of work, the policy of the first role that is for it. ``names`` are their names.

    own_work: what the first role is for, above all. uses_cache: a policy needs to know what replicas have cached.
    """

    def __init__(self, names_by_role: Mapping[Role, str]) -> None:
        """``names_by_role``: the roles of a pool's replicas, each with the name of its policy."""
        self.names: dict[Work, str] = {}
        self._policies: dict[Work, Policy] = {}
        for role, name in names_by_role.items():
            for work in role.prefers:
                if work not in self.names:
                    self.names[work], self._policies[work] = name, make_policy(name, role)
        self.own_work = next(iter(self.names))
        self.uses_cache = PREFIX in names_by_role.values()

    def __getitem__(self, work: Work) -> Policy:
        return self._policies[work]
