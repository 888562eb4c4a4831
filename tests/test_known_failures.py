"""Every known failure of other systems has a test with its number, and docs/known-failures.md lists them."""

from __future__ import annotations

import pytest

from scripts.known_failures_page import page, rows_with_tests
from scripts.marked_tests import ROOT

REQUIRED = (*range(1, 15), *range(16, 25), 37)


@pytest.mark.parametrize("row", REQUIRED)
def test_every_row_has_a_test_that_carries_its_number(row: int) -> None:
    assert rows_with_tests().get(row)


def test_the_page_lists_exactly_the_tests_that_carry_numbers() -> None:
    written = (ROOT / "docs" / "known-failures.md").read_text()

    assert written == page(), "python -m scripts.known_failures_page > docs/known-failures.md"
