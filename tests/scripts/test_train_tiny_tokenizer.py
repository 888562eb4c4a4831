"""The tokenizer and the chat format that training, transformers and Baton share."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.train_tiny.conversation import tokenizer_corpus
from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.tokenizer import (
    BEGIN,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    render,
    token_id,
    train_tokenizer,
)

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
