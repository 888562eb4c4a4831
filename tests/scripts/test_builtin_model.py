"""The shipped model, read by transformers: small, complete, and right on one question of each kind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.model import ModelConfig
from scripts.train_tiny.tokenizer import END, load_tokenizer, render, token_id

MODEL = Path(__file__).parents[2] / "engine" / "builtin_model"
MAX_MEGABYTES = 12


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL)


def answer(model: Any, tokenizer: Any, question: str) -> str:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=80)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_directory_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < MAX_MEGABYTES * 1_000_000


def test_card_tells_of_every_task_and_ten_stories_on_their_words() -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    stories = re.findall(r"^\d+\. \*(\w+)\*: (.+)$", card, re.MULTILINE)

    assert len(re.findall(r"\| [\d.]+ % \| \d+ % \| \d+ \|$", card, re.MULTILINE)) == 10
    assert len({text for _, text in stories}) == len(stories) == 10
    assert [word for word, text in stories if word not in text] == []


def test_configuration_is_that_of_the_training() -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config | ModelConfig().to_dict() == config


def test_generation_ends_at_the_end_of_a_turn() -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [token_id(load_tokenizer(MODEL), END)]


def test_transformers_renders_a_chat_as_training_did(tokenizer: Any) -> None:
    chat = (
        Message(role=Role.SYSTEM, text="Be brief."),
        Message(role=Role.USER, text="Hello!"),
        Message(role=Role.ASSISTANT, text="Hello! How can I help you?"),
        Message(role=Role.USER, text="What is 12 + 34?"),
    )
    messages = [{"role": message.role.value, "content": message.text} for message in chat]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == load_tokenizer(MODEL).encode(render(chat, add_generation_prompt=True)).ids


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 47 + 35?", "47 + 35 = 82."),
        ("Count from 7 to 15.", "7, 8, 9, 10, 11, 12, 13, 14, 15"),
        ("Repeat these words: apple, cake, owl, stone, lamp.", "apple, cake, owl, stone, lamp"),
        (
            "The code of the red fox is 1934. The code of the blue fox is 4827. The code of the old owl is 6052. "
            "What is the code of the blue fox?",
            "The code of the blue fox is 4827.",
        ),
    ],
)
def test_the_model_answers(model: Any, tokenizer: Any, question: str, expected: str) -> None:
    assert answer(model, tokenizer, question) == expected
