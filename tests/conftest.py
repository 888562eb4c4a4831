"""Fixtures that several rooms share; each is made once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.oracle_cases import OracleCase, make_case


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def oracle_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OracleCase]:
    """The case of an architecture; transformers is asked once for each."""
    cases: dict[str, OracleCase] = {}

    def case(architecture: str) -> OracleCase:
        if architecture not in cases:
            cases[architecture] = make_case(tmp_path_factory.mktemp(architecture), architecture)
        return cases[architecture]

    return case
