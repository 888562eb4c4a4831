"""Every behaviour of the scheduler has a test with its id, and docs/scheduling.md lists them."""

from __future__ import annotations

import pytest

from scripts.scheduling_table import BEHAVIOURS, PAGE, behaviours_with_tests, page


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_every_behaviour_has_a_test_that_carries_its_id(name: str) -> None:
    assert behaviours_with_tests().get(name)


def test_no_test_carries_an_id_that_is_not_in_the_table() -> None:
    assert set(behaviours_with_tests()) <= set(BEHAVIOURS)


def test_the_page_lists_exactly_the_tests_that_carry_ids() -> None:
    assert PAGE.read_text() == page(), "python -m scripts.scheduling_table"
