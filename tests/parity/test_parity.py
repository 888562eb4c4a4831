"""Every feature along every path and through every fault: the answer is that of one engine that nothing disturbs.

Rows are in features.py, columns in columns.py. Tokens, text, usage, how each choice ended and all log-probabilities are
compared. Some of the rows are asked of models too whose layers have windows, all or some of them, and of one that
caches latents. What one engine says is what transformers says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.parity.columns import COLUMNS, ONE_ENGINE
from tests.parity.features import FEATURES, WINDOWED_FEATURES
from tests.support.engine.checkpoints import load_oracle, oracle_greedy
from tests.support.parity.answers import Answer, assert_same, is_same
from tests.support.parity.feature import NUM_TOKENS, Feature
from tests.support.parity.setup import (
    ALL_WINDOWED,
    BY_ITS_OWN_LAYERS,
    BY_TRANSFORMERS,
    FULL,
    LATENTS,
    ONE_SCALED_ROTATION,
    PARTLY_WINDOWED,
    TWO_ROTATIONS,
    WINDOW,
)
from tests.support.parity.worlds import Worlds

pytestmark = pytest.mark.asyncio(loop_scope="module")

Undisturbed = Callable[[str, Feature], Awaitable[Answer]]
BY_NAME = {feature.name: feature for feature in FEATURES}
WINDOWED = {"all windowed": ALL_WINDOWED, "partly windowed": PARTLY_WINDOWED}
MODELS = {
    "full": FULL,
    **WINDOWED,
    "two rotations": TWO_ROTATIONS,
    "one scaled rotation": ONE_SCALED_ROTATION,
    "latents": LATENTS,
    "transformers_backend": BY_TRANSFORMERS,
    "transformers' own layers": BY_ITS_OWN_LAYERS,
}
ROWS = [("full", name) for name in BY_NAME] + [(model, name) for model in WINDOWED for name in WINDOWED_FEATURES]
ROWS += [
    ("two rotations", "everything"),
    ("one scaled rotation", "everything"),
    ("latents", "everything"),
    ("latents", "several prompts"),
]
ROWS += [("transformers_backend", "everything"), ("transformers' own layers", "everything")]
ROWS += [("partly windowed", "beam search")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: model.write(tmp_path_factory.mktemp("parity") / "model") for name, model in MODELS.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worlds() -> AsyncIterator[Worlds]:
    kept = Worlds()
    yield kept
    await kept.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(models: dict[str, Path]) -> AsyncIterator[Undisturbed]:
    """The answers of one engine without faults, each computed once."""
    answers: dict[tuple[str, str], Answer] = {}
    kept = {model: Worlds() for model in models}

    async def answer(model: str, feature: Feature) -> Answer:
        if (model, feature.name) not in answers:
            answers[model, feature.name] = await ONE_ENGINE.answer(kept[model], models[model], feature)
        return answers[model, feature.name]

    yield answer
    for worlds in kept.values():
        await worlds.close()


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize(("model", "name"), ROWS, ids=map(", ".join, ROWS))
@pytest.mark.parametrize("column", COLUMNS)
async def test_answer_is_that_of_one_engine(
    models: dict[str, Path], worlds: Worlds, undisturbed: Undisturbed, column: str, model: str, name: str
) -> None:
    feature = BY_NAME[name]

    assert_same(await COLUMNS[column].answer(worlds, models[model], feature), await undisturbed(model, feature))


@pytest.mark.parametrize("name", BY_NAME)
async def test_feature_changes_the_answer(
    models: dict[str, Path], worlds: Worlds, undisturbed: Undisturbed, name: str
) -> None:
    """A row that changes nothing says why; any other would be right without its feature."""
    feature = BY_NAME[name]
    plain = Feature(name="plain", fields={}, needs=feature.needs, is_chat=feature.is_chat)

    answer = await ONE_ENGINE.answer(worlds, models["full"], plain)

    assert is_same(await undisturbed("full", feature), answer) == bool(feature.same_answer)


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("model", MODELS)
async def test_one_engine_says_what_transformers_says(
    models: dict[str, Path], undisturbed: Undisturbed, model: str
) -> None:
    answer = await undisturbed(model, BY_NAME["greedy"])

    prompt, tokens = (answer["choices"][0][name] for name in ("prompt_token_ids", "token_ids"))
    assert len(prompt) > 2 * WINDOW
    assert tokens == oracle_greedy(load_oracle(models[model]), prompt, NUM_TOKENS)
