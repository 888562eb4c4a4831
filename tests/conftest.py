"""Fixtures that several rooms share; each is made once a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.oracle_cases import OracleCase


@pytest.fixture(scope="session")
def oracle_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OracleCase]:
    """The case of an architecture; transformers is asked once for each."""
    from tests.support.oracle_cases import make_case  # imported late: it loads torch, which most rooms do without

    cases: dict[str, OracleCase] = {}

    def case(architecture: str) -> OracleCase:
        if architecture not in cases:
            cases[architecture] = make_case(tmp_path_factory.mktemp(architecture), architecture)
        return cases[architecture]

    return case
