"""One command at a time works on the cluster of a Ray."""

from __future__ import annotations

import pytest

from cluster.deploy.claim import Claim, ClaimedError, give_back, take_claim
from tests.support.cluster.fake_ray import FakeRay


def claim(job_id: str) -> Claim:
    return Claim.of_this_process("baton serve", what="tiny on 127.0.0.1:8000", job_id=job_id)


def everyone() -> set[str]:
    return {"a", "b", "c"}


def test_second_command_is_told_who_was_first(ray: FakeRay) -> None:
    take_claim(claim("a"), everyone)

    with pytest.raises(
        ClaimedError, match=r"^tiny on 127\.0\.0\.1:8000, of the `baton serve` that .+ started on .+ at"
    ):
        take_claim(claim("b"), everyone)


def test_claim_that_was_given_back_is_free(ray: FakeRay) -> None:
    give_back(take_claim(claim("a"), everyone))

    take_claim(claim("b"), everyone)
    with pytest.raises(ClaimedError):
        take_claim(claim("c"), everyone)


def test_command_that_was_killed_holds_nothing(ray: FakeRay) -> None:
    take_claim(claim("a"), everyone)

    take_claim(claim("b"), lambda: {"b"})
    with pytest.raises(ClaimedError):
        take_claim(claim("c"), everyone)


def test_claims_do_not_pile_up(ray: FakeRay) -> None:
    for _ in range(5):
        give_back(take_claim(claim("a"), everyone))

    assert len(ray.store.values) == 1


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("left_behind", [False, True])
def test_of_two_that_ask_at_once_one_has_it(ray: FakeRay, step: int, is_over: bool, left_behind: bool) -> None:
    """Another command comes, or comes and goes before a third one, at any access of the first to the store."""
    if left_behind:
        take_claim(claim("dead"), everyone)
    steps = iter(range(1, step + 1))
    holders: list[str] = []

    def try_to_take(name: str) -> int | None:
        try:
            number = take_claim(claim(name), everyone)
        except ClaimedError:
            return None
        holders.append(name)
        return number

    def others_come() -> None:
        if next(steps, None) != step:
            return
        ray.store.before_each = lambda: None
        second = try_to_take("b")
        if is_over and second is not None:
            holders.remove("b")
            give_back(second)
            try_to_take("c")

    ray.store.before_each = others_come
    try_to_take("a")
    ray.store.before_each = lambda: None

    assert len(holders) == 1
    with pytest.raises(ClaimedError):
        take_claim(claim("a"), everyone)
