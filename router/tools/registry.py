"""The formats of tool calls and thinking, and which one a model uses."""

from __future__ import annotations

from typing import Final

from router.tools.formats.gemma import GemmaFormat
from router.tools.formats.harmony import HarmonyFormat
from router.tools.formats.hermes import HermesFormat
from router.tools.formats.llama3 import Llama3Format
from router.tools.formats.mistral import MistralArgsFormat, MistralListFormat
from router.tools.lark import Vocabulary
from router.tools.reasoning import REASONING_FORMATS, ReasoningFormat
from router.tools.tool_format import ToolFormat

AUTO: Final = "auto"
NONE: Final = "none"

TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    item.name: item
    for item in (
        HarmonyFormat(),
        MistralArgsFormat(),
        MistralListFormat(),
        HermesFormat(),
        Llama3Format(),
        GemmaFormat(name="gemma4", begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
        GemmaFormat(name="functiongemma", begin="<start_function_call>", end="<end_function_call>", quote="<escape>"),
    )
}
"""In the order in which a template is tried."""


def tool_format(setting: str, template: str | None) -> ToolFormat | None:
    """The format of that name; ``auto`` chooses by the chat template, and finds none if that takes no tools."""
    if setting == NONE:
        return None
    if setting != AUTO:
        return TOOL_FORMATS[setting]
    if template is None or "tools" not in template:
        return None
    return next((item for item in TOOL_FORMATS.values() if item.is_spoken_by(template)), None)


def reasoning_format(setting: str, template: str | None, vocabulary: Vocabulary) -> ReasoningFormat | None:
    """The format of that name; ``auto`` chooses by the chat template and the model's tokens."""
    if setting == NONE:
        return None
    if setting != AUTO:
        return REASONING_FORMATS[setting]
    if template is None:
        return None
    return next((item for item in REASONING_FORMATS.values() if item.is_spoken_by(template, vocabulary)), None)
