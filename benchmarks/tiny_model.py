"""Held-out accuracy of the built-in model, greedy: recall, lists, sums, tools, schemas and more; ten stories.

    python -m benchmarks.tiny_model --num-per-task 200 --json tiny_model.json

Asked through transformers, or with ``--engine baton`` through Baton's own engine. Ends with 1 where a task misses
its goal.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.arguments import count
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import EngineConfig, ModelConfigSource
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.offline import generate
from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.probes import Probe, probes
from scripts.train_tiny.words import article

DEFAULT_MODEL = Path(__file__).parent.parent / "engine" / "builtin_model"
STORY_WORDS = ("fox", "lamp", "dragon", "key", "owl", "robot", "whale", "violin", "penguin", "kite")
MAX_NEW_TOKENS = 160
MAX_AT_ONCE = 1024
"""Number of chats in a batch for Baton's engine, which lets at most 4,096 requests wait."""

Chat = tuple[Message, ...]


class Answerer(Protocol):
    """Answers chats greedily."""

    def answer(self, chats: Sequence[Chat]) -> list[str]:
        """The answer to each chat, without its end token."""


class TransformersAnswerer:
    """Answers with the Hugging Face implementation, as the reference."""

    def __init__(self, model: Path, *, dtype: torch.dtype, batch_size: int) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._batch_size = batch_size

    def answer(self, chats: Sequence[Chat]) -> list[str]:
        """The answer to each chat, computed in batches of similar length."""
        order = sorted(range(len(chats)), key=lambda index: len(chats[index][-1].text))
        answers = [""] * len(chats)
        for start in range(0, len(order), self._batch_size):
            indices = order[start : start + self._batch_size]
            for index, text in zip(indices, self._answer_batch([chats[i] for i in indices]), strict=True):
                answers[index] = text
        return answers

    def _answer_batch(self, chats: Sequence[Chat]) -> list[str]:
        inputs = self._tokenizer.apply_chat_template(
            [[{"role": message.role.value, "content": message.text} for message in chat] for chat in chats],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            outputs = self._model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        texts: list[str] = self._tokenizer.batch_decode(
            outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return texts


class BatonAnswerer:
    """Answers with Baton's engine, many chats at once."""

    def __init__(self, model: Path, *, dtype: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        built = build_engine(EngineConfig(model=ModelConfigSource(path=model, device="cpu", dtype=dtype)))  # type: ignore[arg-type]
        self._core, self._eos = built.core, built.facts.eos_token_ids

    def answer(self, chats: Sequence[Chat]) -> list[str]:
        """The answer to each chat."""
        requests = [self._request(str(number), chat) for number, chat in enumerate(chats)]
        outputs: dict[str, list[int]] = {}
        for start in range(0, len(requests), MAX_AT_ONCE):
            outputs |= generate(self._core, requests[start : start + MAX_AT_ONCE])
        return [self._tokenizer.decode(outputs[request.request_id], skip_special_tokens=True) for request in requests]

    def _request(self, request_id: str, chat: Chat) -> GenerateRequest:
        messages = [{"role": message.role.value, "content": message.text} for message in chat]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(prompt["input_ids"]),
            sampling=SamplingParams(max_tokens=MAX_NEW_TOKENS, eos_token_ids=self._eos),
        )


GOALS: dict[str, float] = {
    "recall_100": 95,
    "recall_300": 90,
    "recall_500": 85,
    "list_5": 95,
    "count": 95,
    "add": 80,
    "tool_call": 90,
    "tool_result": 90,
    "tool_unneeded": 90,
    "fields": 90,
}


def accuracy_rows(
    answerer: Answerer, questions: Sequence[Probe], *, num_shown: int, **detail: float | str
) -> list[Row]:
    """A row for each task: the percentage of answers that are exactly right. Prints the first wrong ones."""
    answers = answerer.answer([question.messages for question in questions])
    outcomes: defaultdict[str, list[bool]] = defaultdict(list)
    wrong: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for question, answer in zip(questions, answers, strict=True):
        outcomes[question.task].append(answer == question.answer)
        if answer != question.answer:
            wrong[question.task].append((question.answer, answer))
    for task, pairs in wrong.items():
        for expected, answer in pairs[:num_shown]:
            print(f"wrong: {task}: expected {expected!r}, got {answer!r}")
    return [
        Row(
            name=f"tiny_model.{task}",
            value=100 * sum(values) / len(values),
            unit="percent",
            detail={"goal": GOALS[task], "num_samples": len(values), **detail},
        )
        for task, values in outcomes.items()
    ]


def missed_goals(rows: Sequence[Row]) -> list[str]:
    """The tasks below their goals, as text."""
    return [
        f"{row.name} is {row.value:.1f} %, the goal {row.detail['goal']:g} %"
        for row in rows
        if row.value < float(row.detail["goal"])
    ]


def stories(answerer: Answerer) -> dict[str, str]:
    """The story that the model tells about each of ten words."""
    chats = [(Message(role=Role.USER, text=f"Tell me a story about {article(word)}."),) for word in STORY_WORDS]
    return dict(zip(STORY_WORDS, answerer.answer(chats), strict=True))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiny_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--engine", choices=["transformers", "baton"], default="transformers")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--num-per-task", type=count, default=200)
    parser.add_argument("--batch-size", type=count, default=16, help="number of chats in a batch of transformers")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions; training validates with seed 0")
    parser.add_argument("--show-wrong", type=int, default=2, metavar="N", help="print N wrong answers per task")
    parser.add_argument("--stories", type=Path, metavar="FILE", help="write the ten stories as JSON to FILE")
    add_json_option(parser)
    args = parser.parse_args()

    start = time.monotonic()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    questions = probes(args.seed, args.num_per_task, lambda text: len(tokenizer.encode(text)))
    answerer: Answerer
    if args.engine == "baton":
        answerer = BatonAnswerer(args.model, dtype=args.dtype)
    else:
        answerer = TransformersAnswerer(args.model, dtype=getattr(torch, args.dtype), batch_size=args.batch_size)
    rows = accuracy_rows(answerer, questions, num_shown=args.show_wrong, engine=args.engine, dtype=args.dtype)
    told = stories(answerer)
    for word, text in told.items():
        print(f"story ({word}): {text}")
    if args.stories:
        args.stories.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    seconds = Row(name="tiny_model.duration", value=time.monotonic() - start, unit="s")
    title = f"Built-in model, {args.engine}, {args.dtype}, seed {args.seed}"
    publish([*rows, seconds], packages=("torch", "transformers"), json_file=args.json, title=title)
    if missed := missed_goals(rows):
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
