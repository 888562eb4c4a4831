"""docs/scheduling.md says which test holds which row: it must stay true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = re.findall(r"^\| ([A-Z]\d+) \| .*? \| (.*) \|$", (ROOT / "docs" / "scheduling.md").read_text(), re.MULTILINE)
REQUIRED = {
    *(f"C{number}" for number in range(1, 15)),
    *(f"B{number}" for number in range(1, 8)),
    *("K1", "K2", "K3", "K4", "K6", "K7", "K9", "O2", "O3", "O4", "O6", "I2"),
}


def test_every_required_row_is_in_the_table() -> None:
    assert {row_id for row_id, _ in ROWS} >= REQUIRED


@pytest.mark.parametrize(("row_id", "tests"), ROWS)
def test_the_tests_of_a_row_exist_and_carry_its_id(row_id: str, tests: str) -> None:
    for cell in tests.split("<br>"):
        file, *names = re.findall(r"`([^`]+)`", cell)
        source = (Path(__file__).parent / file).read_text()
        for name in names:
            assert f"def {name}(" in source
            assert row_id.lower() in name.split("_")
