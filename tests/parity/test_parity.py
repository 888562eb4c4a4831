"""Every feature along every path and through every fault: the answer is that of one engine that nothing disturbs.

Rows are in features.py, columns in columns.py. Tokens, text, usage, how each choice ended and all log-probabilities are
compared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.parity.columns import COLUMNS, one_engine
from tests.parity.features import FEATURES
from tests.support.parity.answers import Answer, assert_same, is_same
from tests.support.parity.feature import Feature
from tests.support.parity.world import make_parity_model

Undisturbed = Callable[[Feature], Awaitable[Answer]]
BY_NAME = {feature.name: feature for feature in FEATURES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parity_model(tmp_path_factory.mktemp("parity") / "llama")


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Undisturbed:
    """What one engine answers to a row; it is asked once."""
    answers: dict[str, Answer] = {}

    async def answer(feature: Feature) -> Answer:
        if feature.name not in answers:
            answers[feature.name] = await one_engine(model, feature)
        return answers[feature.name]

    return answer


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("column", COLUMNS)
async def test_answer_is_that_of_one_engine(model: Path, undisturbed: Undisturbed, column: str, name: str) -> None:
    feature = BY_NAME[name]

    assert_same(await COLUMNS[column](model, feature), await undisturbed(feature))


@pytest.mark.parametrize("name", BY_NAME)
async def test_feature_changes_the_answer(model: Path, undisturbed: Undisturbed, name: str) -> None:
    """A row that changes nothing says why; any other would be right without its feature."""
    feature = BY_NAME[name]
    plain = Feature(name="plain", fields={}, needs=feature.needs, is_chat=feature.is_chat)

    assert is_same(await undisturbed(feature), await one_engine(model, plain)) == bool(feature.same_answer)
