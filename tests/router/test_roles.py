"""The roles: which work they are for, and which workers connect to each other."""

from __future__ import annotations

import pickle
from typing import cast

import pytest

from engine.contract.role import LoadMeasure, Role, Work
from router.roles import ROLES, groups_of_roles, role_for, role_named, roles_met_by

PAIR = ("prefill", "decode")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Role:
    """A further role, for both kinds of work."""
    role = Role(name="both", prefers=tuple(Work), measure=LoadMeasure.KV_USAGE, policy="kv_usage", prompt_share=0.5)
    monkeypatch.setitem(cast("dict[str, Role]", ROLES), role.name, role)
    return role


def names(*roles: Role) -> list[str]:
    return [role.name for role in roles]


@pytest.mark.parametrize("name", ROLES)
def test_no_role_is_another_one_than_itself_in_another_process(name: str) -> None:
    received = pickle.loads(pickle.dumps(ROLES[name]))

    met = names(*roles_met_by(received, ROLES))

    assert name not in met
    assert met == names(*roles_met_by(ROLES[name], ROLES))


def test_every_kind_of_work_has_a_role_of_its_own() -> None:
    assert {work: role_for(work).name for work in Work} == {Work.PROMPT: "prefill", Work.STREAM: "decode"}
    assert role_named("of a newer version") is role_for(Work.STREAM)


def test_roles_share_their_work_if_they_are_elastic_or_one_is_for_both_kinds(both: Role) -> None:
    def groups(*pools: str, is_elastic: bool = False) -> list[list[str]]:
        return [names(*group) for group in groups_of_roles(pools, is_elastic=is_elastic)]

    assert groups(*PAIR) == [["prefill"], ["decode"]]
    assert groups(*PAIR, is_elastic=True) == [["prefill", "decode"]]
    assert groups(*PAIR, both.name) == [["prefill", "decode", "both"]]


def test_workers_meet_where_one_may_go_on_with_what_the_other_computed(both: Role) -> None:
    prefill, decode = (ROLES[name] for name in PAIR)

    assert names(*roles_met_by(prefill, ROLES))[0] == "decode"
    assert not prefill.meets(prefill)
    assert [role.moves_out for role in (prefill, decode, both)] == [False, True, True]
    assert decode.is_followed_by(both)
    assert not decode.is_followed_by(prefill)
    assert all(prefill.elastic().is_followed_by(other) for other in roles_met_by(prefill.elastic(), ROLES))


def test_roles_lean_to_what_they_are_for(both: Role) -> None:
    assert [role.leans_to_prompts for role in (*(ROLES[name] for name in PAIR), both)] == [1.0, 0.0, 0.5]
