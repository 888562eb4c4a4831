"""The formats of a model, found by parts of real chat templates and by its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.settings import RouterSettings
from router.tools.reasoning import REASONING_FORMATS
from router.tools.registry import TOOL_FORMATS, reasoning_format, tool_format
from tests.support.router.turns import GrammarRig

QWEN = (
    r"{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    r"{{- '<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>' }}{%- endif %}"
)
QWEN_3 = QWEN + r"{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
QWEN_CODER = r"{%- if tools %}{{- '<tool_call>\n<function=example_function_name>\n<parameter=x>' }}{%- endif %}"
LLAMA_3 = (
    "{{- '<|start_header_id|>system<|end_header_id|>' }}{%- if tools is not none %}"
    """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' """
    "}}"
    "{%- endif %}"
)
MISTRAL_7 = """{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- "[TOOL_CALLS] [" }}"""
MISTRAL_11 = """{%- for tool in tools %}{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}{%- endfor %}"""
MAGISTRAL = MISTRAL_11 + "{{- '[THINK]' + block['thinking'] + '[/THINK]' }}"
GPT_OSS = """{%- if tools -%}{{- "<|start|>assistant<|channel|>analysis<|message|>" }}{%- endif -%}"""
GEMMA_3 = "{{ '<start_of_turn>' + role + '\n' }}"
FUNCTION_GEMMA = (
    "{%- for tool in tools %}{{- '<start_function_declaration>' -}}{%- endfor %}"
    "{{- '<start_function_call>call:' + function['name'] + '{' -}}"
)
GEMMA_4 = (
    "{%- for tool in tools %}{{- '<|tool>' -}}{%- endfor %}{{- '<|tool_call>call:' + function['name'] + '{' -}}"
    "{%- for part in text.split('<channel|>') -%}{%- if '<|channel>' in part -%}"
)
DEEPSEEK_R1 = (
    "{% if tools %}<\uff5ctool\u2581calls\u2581begin\uff5c>{% endif %}{% set content = content.split('</think>')[-1] %}"
)

SPOKEN = [
    (QWEN, "hermes", None),
    (QWEN_3, "hermes", "think"),
    (QWEN_CODER, None, None),
    (LLAMA_3, "llama3", None),
    (MISTRAL_7, "mistral", None),
    (MISTRAL_11, "mistral_args", None),
    (MAGISTRAL, "mistral_args", "mistral"),
    (GPT_OSS, "harmony", "harmony"),
    (GEMMA_3, None, None),
    (FUNCTION_GEMMA, "functiongemma", None),
    (GEMMA_4, "gemma4", "gemma4"),
    (DEEPSEEK_R1, None, "think"),
]


@pytest.mark.parametrize(("template", "calls", "thinking"), SPOKEN)
def test_templates_tell_how_a_model_calls_and_thinks(template: str, calls: str | None, thinking: str | None) -> None:
    spoken = tool_format("auto", template)
    thought = reasoning_format("auto", template, GrammarRig().vocabulary)

    assert (spoken and spoken.name) == calls
    assert (thought and thought.name) == thinking


def test_tokens_tell_how_a_model_thinks() -> None:
    found = reasoning_format("auto", GEMMA_3, GrammarRig(added=("<think>", "</think>")).vocabulary)

    assert found is REASONING_FORMATS["think"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_operator_has_the_last_word(name: str) -> None:
    assert tool_format(name, None) is TOOL_FORMATS[name]
    assert tool_format("none", QWEN) is None
    assert reasoning_format("none", QWEN_3, GrammarRig().vocabulary) is None
    assert RouterSettings(tool_format=name).tool_format == name


def test_a_format_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tool_format must be one of auto, none, harmony.*'pythonic'"):
        RouterSettings(tool_format="pythonic")


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()

    assert all(f"| `{name}` |" in page for name in (*TOOL_FORMATS, *REASONING_FORMATS))
