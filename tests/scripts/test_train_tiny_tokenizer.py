"""The tokenizer and the chat format that training, transformers and Baton share."""

import json
from random import Random

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.train_tiny.conversation import tokenizer_corpus
from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.split import Split
from scripts.train_tiny.tokenizer import (
    BEGIN,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    render,
    token_id,
    train_tokenizer,
)
from scripts.train_tiny.tools import random_tools, random_use, tools_text

CHAT = (
    Message(role=Role.SYSTEM, text="You are a helpful assistant."),
    Message(role=Role.USER, text="What is 12 + 34?"),
    Message(role=Role.ASSISTANT, text="12 + 34 = 46."),
    Message(role=Role.USER, text="Thank you."),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(tokenizer_corpus(1, 1000))


def test_vocabulary_fits_the_model(tokenizer: Tokenizer) -> None:
    assert 1000 <= tokenizer.get_vocab_size() <= VOCAB_SIZE


def test_special_tokens_come_first_and_are_one_token_each(tokenizer: Tokenizer) -> None:
    assert [token_id(tokenizer, token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode(BEGIN).ids == [token_id(tokenizer, BEGIN)]


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("4827").tokens == ["4", "8", "2", "7"]


_TOKENIZER = train_tokenizer(tokenizer_corpus(1, 50))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert _TOKENIZER.decode(_TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_template_renders_what_training_saw(add_generation_prompt: bool) -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    rendered = template.render(
        messages=[{"role": message.role.value, "content": message.text} for message in CHAT],
        bos_token=BEGIN,
        add_generation_prompt=add_generation_prompt,
    )
    assert rendered == render(CHAT, add_generation_prompt=add_generation_prompt)


def hugging_face_template() -> jinja2.Template:
    """The template in an environment like that of transformers, whose ``tojson`` keeps the order of keys."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def test_the_chat_template_renders_tools_calls_and_results_as_training_saw_them() -> None:
    template = hugging_face_template()
    for seed in range(100):
        rng = Random(seed)
        tools = random_tools(rng)
        use = random_use(rng, Split.TRAIN, tools)
        request, result = use.exchanges
        call = {"function": {"name": use.tool.name, "arguments": use.arguments}}

        rendered = template.render(
            messages=[
                {"role": "user", "content": use.request},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": use.result},
            ],
            tools=[tool.schema() for tool in tools],
            bos_token=BEGIN,
            add_generation_prompt=True,
        )

        seen = (
            Message(role=Role.SYSTEM, text=tools_text(tools)),
            Message(role=Role.USER, text=request.user),
            Message(role=Role.ASSISTANT, text=request.assistant),
            Message(role=Role.USER, text=result.user),
        )
        assert rendered == render(seen, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ({"name": "f"}, "f()"),
        ({"name": "f", "parameters": {}, "description": "Do it."}, "f() Do it."),
        ({"name": "f", "parameters": {"properties": {"a": True, "b": {"anyOf": []}}}}, "f(a?: any, b?: any)"),
        (
            {"name": "f", "parameters": {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}},
            "f(a: string|null)",
        ),
        ({"name": "f", "parameters": {"properties": {"a": {"enum": ["x", 2]}}, "required": None}}, "f(a?: x|2)"),
    ],
)
def test_any_schema_of_a_tool_is_listed(function: dict[str, object], line: str) -> None:
    tool = {"type": "function", "function": function}
    rendered = hugging_face_template().render(messages=[], tools=[tool], bos_token=BEGIN)
    assert rendered == f"{BEGIN}<|system|>Tools:\n{line}<|end|>"
