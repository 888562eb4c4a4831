"""Which pools are sized together, and for which work."""

from __future__ import annotations

from engine.contract.promise import Promise
from router.scaling.group import Group, groups_of
from router.scaling_rules import PoolBounds, ScalingRules
from router.settings import RolesMode, RouterSettings

BOUNDS = PoolBounds(least=1, most=8)
PROMISE = Promise(ttft_ms=1000.0, itl_ms=50.0)
LOCAL = 64


def groups(roles: RolesMode, *pools: str, following: tuple[str, ...] = ("prefill", "decode")) -> list[Group]:
    rules = ScalingRules(pools=dict.fromkeys(following, BOUNDS))
    settings = RouterSettings(roles=roles, scaling=rules, promise=PROMISE, local_prefill_tokens=LOCAL)
    return list(groups_of(settings, dict.fromkeys(pools, 2)))


def test_fixed_pools_for_one_kind_of_work_are_sized_each_for_itself() -> None:
    prompts, streams = groups("fixed", "prefill", "decode")

    assert (list(prompts.wanted), prompts.has_streams) == (["prefill"], False)
    assert (list(streams.wanted), streams.has_streams) == (["decode"], True)
    assert (prompts.over_tokens, streams.up_to_tokens) == (LOCAL, LOCAL), "decode computes what is nearly cached"
    assert [list(group.wanted) for group in groups("fixed", "prefill", "decode", following=("decode",))] == [["decode"]]


def test_elastic_pools_are_sized_together() -> None:
    (group,) = groups("elastic", "prefill", "decode")

    assert list(group.wanted) == ["prefill", "decode"]
    assert group.has_streams
    assert (group.over_tokens, group.up_to_tokens) == (0.0, float("inf"))


def test_a_pool_for_both_kinds_of_work_is_sized_with_those_for_one() -> None:
    (group,) = groups("fixed", "prefill", "decode", "mixed", following=("mixed",))

    assert list(group.wanted) == ["prefill", "decode", "mixed"]
    assert group.has_streams
    assert (group.over_tokens, group.up_to_tokens) == (0.0, float("inf"))
