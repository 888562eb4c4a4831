"""What /v1/messages is asked to remove from a conversation before it is answered: nothing can be removed here."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from router.api.bodies.strict_body import StrictBody, UnsupportedValueError

CLEAR_THINKING: Final = "clear_thinking_20251015"


class AllTurns(StrictBody):
    """The long form of ``all``."""

    type: Literal["all"]


class ContextEdit(StrictBody):
    """The only supported edit, with a ``keep`` that removes the thinking of no turn.

    Without ``keep`` only the last turn's thinking would stay. Whether an edit is accepted does not depend on the
    conversation, so that a client learns of a refusal with its first request.
    """

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_removes(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(kind := data.get("type"), str):
            return data
        if kind != CLEAR_THINKING:
            raise UnsupportedValueError(
                "", kind=kind[:40], hint="leave the edit out, and send only what the model should read"
            )
        if data.get("keep") not in ("all", {"type": "all"}):
            hint = "it would remove reasoning of earlier turns: send 'keep': 'all', or leave the edit out"
            raise UnsupportedValueError("", kind=kind, hint=hint)
        return data


class ContextManagement(StrictBody):
    """Edits of the conversation that the client asks for."""

    edits: list[ContextEdit] | None = Field(None, fail_fast=True)
