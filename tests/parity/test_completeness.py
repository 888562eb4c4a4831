"""No parameter is missing in the parity matrix: a new one has its row, or a reason to have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import StreamOptions
from tests.parity.features import FEATURES, NOT_IN_A_ROW

BODIES = (CompletionBody, ChatBody)


def sent(body: Mapping[str, Any]) -> Iterator[str]:
    for name, value in body.items():
        if value is not None:
            yield name
        if isinstance(value, Mapping) and name == "stream_options":
            yield from (f"{name}.{inner}" for inner in value)


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_a_body_is_sent_by_a_row_of_its_endpoint(body: type[CompletionBody] | type[ChatBody]) -> None:
    rows = [feature for feature in FEATURES if feature.is_chat == (body is ChatBody)]
    other = {name for feature in FEATURES for name in sent(feature.body)}
    mine = {name for feature in rows for name in sent(feature.body)}
    own = set(body.model_fields) - set(BODIES[body is CompletionBody].model_fields)
    known = set(body.model_fields) | {f"stream_options.{name}" for name in StreamOptions.model_fields}

    missing = known - other - body.without_effect - set(NOT_IN_A_ROW)

    assert not missing, "add a row to tests/parity/features.py, or a reason to NOT_IN_A_ROW"
    assert own <= mine


def test_reasons_are_for_fields_that_exist_and_have_no_row() -> None:
    fields = {name for body in BODIES for name in body.model_fields}
    sent_fields = {name for feature in FEATURES for name in sent(feature.body)}

    assert fields - sent_fields >= set(NOT_IN_A_ROW)
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
