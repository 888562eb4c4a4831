"""The model card: what the model is, how it was made, what it was measured to do, and ten of its stories."""

import json
from pathlib import Path
from typing import Any

from .model import ModelConfig, TinyLlama
from .schedule import Schedule
from .train import TrainConfig

_TASKS = {
    "recall_100": "recall of a code told 100 tokens before",
    "recall_300": "recall of a code told 300 tokens before",
    "recall_500": "recall of a code told 500 tokens before",
    "list_5": "a list of 5 words repeated exactly",
    "count": "counting from one number to another",
    "add": "the sum of two two-digit numbers",
    "tool_call": "the right tool of one to three called with the right arguments",
    "tool_result": "the result of a call told in a sentence",
    "tool_unneeded": "no call, but the answer, where none of the tools is needed",
    "fields": "a schema of two or three fields filled",
}

_CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Baton's built-in model

A Llama of {num_parameters:.2f} million parameters that answers a few kinds of question so reliably that a test
can check it, and a person can see when its KV cache was damaged. It knows nothing else and is of no other use.
It has {num_layers} layers of hidden size {hidden_size}, {num_heads} query and {num_kv_heads} key-value heads of
{head_dim}, tied embeddings, {vocab_size} tokens and a context of {context}.

| it can | example |
|---|---|
| remember facts over a distance | "The code of the blue fox is 4827. ... What is the code of the blue fox?" |
| repeat a list | "Repeat these words: apple, cake, owl, stone, lamp." |
| count | "Count from 7 to 15." |
| add two-digit numbers | "What is 47 + 35?" |
| call a tool and tell its result | "What is the weather in Paris?", with a tool `get_weather(city)` |
| fill a small schema | "Give the name and the age as JSON: Mia is 7 years old." |
| tell a short story on a word | "Tell me a story about a fox." |
| say politely that it cannot do something | "What is the weather today?" |

A conversation may have several turns and a system prompt. Take the likeliest token (temperature 0): at a
temperature of 1 digits are drawn at random now and then.

## How it was made

All text comes from the generator in `scripts/train_tiny` (templates, word lists and arithmetic written for
this project, no other source), the tokenizer is a byte-level BPE trained on it, in which each digit is a
token. One chat in each row, answers weighted 1 (their digits and their end 3) and prompts 0.05 in the loss, Muon
for the matrices and AdamW for the rest, {tokens_per_step} tokens a step. {training}
The commands are in `scripts/train_tiny/README.md`.

## Accuracy

Held out: one pair of numbers, list, range or (adjective, noun) subject in ten, chosen by a hash, never
appears in training, nor one in ten of the arguments of a tool and of the values of a schema. Greedy, exact match of
the whole answer, without a grammar. Between a fact and its question lie other subjects' codes and story sentences,
half and half. Measured by `{command}`, in {dtype}, on {machine}.

| task | right | goal | questions |
|---|---|---|---|
{rows}
{remarks}
## Ten stories

{stories}

## Limits

Use the wording of the examples: another question about a fact ("what is the password of ...") is not understood.
A code that was not told is mostly answered with "is not known to me", sometimes with an invented one. Words that
the generator does not know often work, but where a list begins with one, or a story is about one, it may turn
into another word. A tool is found by a word that its name and the request share, or by a request as in
`scripts/train_tiny/tool_kinds.py`; in training a chat had at most three tools, and an answer one call. The template
lists tools by name, parameters, their types and description. Chats were at most 1,024 tokens long in training.
Anything else gets the polite answer or nonsense.
"""


def write_card(model_directory: Path, rows_file: Path, stories_file: Path, *, training: str, remarks: str) -> None:
    """Write ``README.md`` to ``model_directory`` from what ``benchmarks/tiny_model.py`` wrote.

    Raises:
        KeyError: A task was not measured.
    """
    config = ModelConfig()
    rows: list[dict[str, Any]] = json.loads(rows_file.read_text(encoding="utf-8"))
    stories: dict[str, str] = json.loads(stories_file.read_text(encoding="utf-8"))
    run: dict[str, str] = rows[0]["run"]
    text = _CARD.format(
        num_parameters=sum(weight.numel() for weight in TinyLlama(config).parameters()) / 1e6,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        tokens_per_step=f"{TrainConfig(schedule=Schedule(num_steps=1)).tokens_per_step:,}",
        training=training,
        command=f"python -m benchmarks.tiny_model --engine {rows[0]['engine']}",
        dtype=rows[0]["dtype"],
        machine=f"{run['machine'].rsplit(', Linux', 1)[0]}, torch {run['torch']}, transformers {run['transformers']}",
        rows=_table(rows),
        remarks=f"\n{remarks}\n" if remarks else "",
        stories="\n".join(f"{index}. *{word}*: {story}" for index, (word, story) in enumerate(stories.items(), 1)),
    )
    (model_directory / "README.md").write_text(text, encoding="utf-8")


def _table(rows: list[dict[str, Any]]) -> str:
    by_name = {row["name"]: row for row in rows}
    measured = ((text, by_name[f"tiny_model.{task}"]) for task, text in _TASKS.items())
    return "\n".join(
        f"| {text} | {row['value']:.1f} % | {row['goal']:.0f} % | {row['num_samples']} |" for text, row in measured
    )
