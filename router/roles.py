"""The roles that a cluster has, by their names, in the order in which people read them."""

from __future__ import annotations

from collections.abc import Mapping

from decode.role import DECODE
from engine.contract.role import Role
from prefill.role import PREFILL

ROLES: Mapping[str, Role] = {role.name: role for role in (PREFILL, DECODE)}
