"""The built-in model gives the same answers in Baton and in transformers, and they are right."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.config.served_model import BUILTIN_QUESTION
from engine.build import build_engine
from engine.contract.checkpoint.end_tokens import read_end_tokens
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.offline import generate
from engine.model.builtin import builtin_model_dir
from router.text.template_files import load_chat_templates
from router.text.tokenizer import Tokenizer

MODEL = builtin_model_dir()
MAX_TOKENS = 90

QUESTIONS = {
    BUILTIN_QUESTION: "The code of the blue fox is 4827.",
    "Repeat these words: cake, owl, stone, lamp, kite.": "cake, owl, stone, lamp, kite",
    "Count from 7 to 15.": "7, 8, 9, 10, 11, 12, 13, 14, 15",
    "What is 47 + 35?": "82",
    "Tell me a story about a fox.": "fox",
    "What is the weather today?": "",
}


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    tokenizer = Tokenizer.load(MODEL)
    templates = load_chat_templates(MODEL, special_tokens=tokenizer.special.named)
    assert templates is not None
    return {
        question: tokenizer.encode(
            templates.default.render([{"role": "user", "content": question}]), add_special_tokens=False
        )
        for question in QUESTIONS
    }


@pytest.fixture(scope="module")
def answers(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    config = EngineConfig(model=ModelConfigSource(path=MODEL, device="cpu"), cache=CacheConfig(num_blocks=256))
    eos = read_end_tokens(MODEL)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, eos_token_ids=eos)
    requests = [
        GenerateRequest(request_id=question, prompt_token_ids=TokenIds.of(prompt), sampling=sampling)
        for question, prompt in prompts.items()
    ]
    return generate(build_engine(config).core, requests)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_right(question: str, answers: dict[str, list[int]]) -> None:
    assert QUESTIONS[question] in Tokenizer.load(MODEL).decode(answers[question])


def test_transformers_answers_the_same(prompts: dict[str, list[int]], answers: dict[str, list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for question, prompt in prompts.items():
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert inputs["input_ids"][0].tolist() == prompt
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
        assert output[0, len(prompt) :].tolist() == answers[question]
