"""No parameter is missing in the parity matrix: a new one has its row, or a reason to have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.contract.messages import SamplingParams
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import StreamOptions
from tests.parity.features import FEATURES, NOT_IN_A_ROW
from tests.support.parity.setup import FULL
from tests.support.parity.world import world


def sent(body: Mapping[str, Any]) -> Iterator[str]:
    for name, value in body.items():
        if value is not None:
            yield name
        if isinstance(value, Mapping) and name == "stream_options":
            yield from (f"{name}.{inner}" for inner in value)


def fields_of(body: type[CompletionBody] | type[ChatBody]) -> set[str]:
    return {*body.model_fields, *(f"stream_options.{name}" for name in StreamOptions.model_fields)}


def sent_to(*, is_chat: bool) -> set[str]:
    return {name for feature in FEATURES if feature.is_chat == is_chat for name in sent(feature.body)}


def test_every_field_is_sent_by_a_row() -> None:
    """A parameter of both endpoints only needs a row for one of them."""
    of_chats, of_texts = fields_of(ChatBody), fields_of(CompletionBody)
    shared = (of_chats & of_texts) - sent_to(is_chat=True) - sent_to(is_chat=False)
    own = (of_chats - of_texts - sent_to(is_chat=True)) | (of_texts - of_chats - sent_to(is_chat=False))

    missing = (shared | own) - ChatBody.without_effect - set(NOT_IN_A_ROW)

    assert not missing, "add a row to tests/parity/features.py, or a reason to NOT_IN_A_ROW"


def test_reasons_are_for_fields_that_exist_and_have_no_row() -> None:
    without_row = fields_of(ChatBody) | fields_of(CompletionBody)
    without_row -= sent_to(is_chat=True) | sent_to(is_chat=False)

    assert set(NOT_IN_A_ROW) <= without_row
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


async def test_every_sampling_parameter_reaches_the_engine_with_a_value_of_its_own(tmp_path: Path) -> None:
    seen: set[str] = set()
    async with world(FULL.write(tmp_path / "model")) as made:
        for feature in FEATURES:
            await made.ask(feature)
        requests = made.prefill.submitted
    plain = SamplingParams(max_tokens=0)
    for request in requests:
        seen |= changed(request.sampling, plain)

    missing = {item.name for item in fields(SamplingParams)} - seen
    assert not missing, "add a row to tests/parity/features.py that gives it another value than its default"


def changed(given: Any, neutral: Any) -> set[str]:
    """The fields of a record that have another value than by default."""
    return {item.name for item in fields(neutral) if getattr(given, item.name) != getattr(neutral, item.name)}
