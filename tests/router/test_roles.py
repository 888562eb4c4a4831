"""The roles, and which workers connect to each other."""

from __future__ import annotations

import pickle

import pytest

from router.roles import ROLES, roles_met_by


@pytest.mark.parametrize("name", ROLES)
def test_no_role_is_another_one_than_itself_in_another_process(name: str) -> None:
    received = pickle.loads(pickle.dumps(ROLES[name]))

    met = [other.name for other in roles_met_by(received)]

    assert name not in met
    assert met == [other.name for other in roles_met_by(ROLES[name])]
