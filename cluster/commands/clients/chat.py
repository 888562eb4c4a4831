"""`baton chat`: a conversation with the model of a running cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
from rich.console import Console

from cluster.client import NotBatonError, answer_of, bearer, code_of, for_terminal, message_of
from cluster.config.served_model import BUILTIN_MODEL_NAME, BUILTIN_QUESTION

TIMEOUT = httpx.Timeout(10.0, read=600.0)
DATA_PREFIX = "data: "
END = "[DONE]"

EXIT = "/exit"
NEW = "/new"
COMMANDS = {
    "/help": "/new starts a new conversation; /exit, an empty line or Ctrl-D quits. Anything else goes to the model, "
    "with the whole conversation; if that outgrows the model's context, its oldest turns are left out.",
    NEW: "A new conversation.",
}
"""Input lines that are answered locally, and the answers."""

LEFT_OUT = "(the conversation has outgrown the model's context: its oldest turns are left out)"
CONTEXT_FULL = "context_length_exceeded"


class ChatError(Exception):
    """The cluster ended an answer with an error."""


class ContextFullError(ChatError):
    """The conversation is longer than the model's context."""


class ChatInputError(Exception):
    """The input is not valid text."""


def chat(url: str, console: Console, *, api_key: str = "") -> None:
    """Read lines and print answers until the end of the input.

    Raises:
        ChatInputError: A line is not valid text.
        httpx.HTTPError: The cluster does not answer, or not well.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT, trust_env=False) as client:
        model = first_model(client)
        console.print(for_terminal(greeting(model)), highlight=False, markup=False, soft_wrap=True)
        messages: list[dict[str, str]] = []
        while (question := ask(console)) not in (None, EXIT):
            if question == NEW:
                messages.clear()
            if question in COMMANDS:
                console.print(COMMANDS[question], markup=False, highlight=False, soft_wrap=True)
                continue
            messages.append({"role": "user", "content": str(question)})
            try:
                answer = answer_in_context(client, model, messages, console)
            except ChatError as error:
                console.print(for_terminal(f"error: {error}"), markup=False, highlight=False)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


def answer_in_context(client: httpx.Client, model: str, messages: list[dict[str, str]], console: Console) -> str:
    """Print and return an answer. The oldest turns are removed from ``messages`` until the rest fits.

    Raises:
        ChatError: The answer ended with an error, or the last question does not fit alone.
        httpx.HTTPError: There was no answer.
    """
    is_told = False
    while True:
        try:
            return print_answer(stream_answer(client, model, messages), console)
        except ContextFullError:
            if len(messages) == 1:
                raise
            del messages[:2]
            if not is_told:
                console.print(LEFT_OUT, markup=False, highlight=False, soft_wrap=True)
            is_told = True


def greeting(model: str) -> str:
    """The first line. It suggests a question to the user of the built-in model, which knows very little."""
    lines = [f"Talking to {model}. An empty line or Ctrl-D quits, /new starts a new conversation, /help shows help."]
    if model == BUILTIN_MODEL_NAME:
        lines += ["It can recall facts, repeat lists, count, add and tell stories. Try:", BUILTIN_QUESTION]
    return "\n".join(lines)


def ask(console: Console) -> str | None:
    """The next line of the user, None at the end.

    Raises:
        ChatInputError: It is not valid UTF-8.
    """
    try:
        line = console.input("> ").strip()
        line.encode()
    except EOFError:
        return None
    except UnicodeError as error:
        raise ChatInputError("the input is not valid UTF-8") from error
    return line or None


def print_answer(pieces: Iterable[str], console: Console) -> str:
    """Print an answer as it comes, and return it whole."""
    answer = ""
    for piece in pieces:
        console.print(for_terminal(piece), end="", markup=False, highlight=False, soft_wrap=True)
        answer += piece
    console.print()
    return answer


def first_model(client: httpx.Client) -> str:
    """The name of the model that the cluster serves."""
    response = client.get("/v1/models")
    models = answer_of(response, "data")["data"]
    if not models:
        raise NotBatonError(f"{response.request.url} lists no model")
    return str(models[0]["id"])


def stream_answer(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> Iterator[str]:
    """Yield an answer's text piece by piece.

    Raises:
        ContextFullError: The conversation is longer than the model's context.
        ChatError: The answer ended with an error.
        httpx.HTTPError: There was no answer.
    """
    body = {"model": model, "messages": messages, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            if code_of(response) == CONTEXT_FULL:
                raise ContextFullError(message_of(response))
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith(DATA_PREFIX) or line == DATA_PREFIX + END:
                continue
            event: dict[str, Any] = json.loads(line.removeprefix(DATA_PREFIX))
            if "error" in event:
                raise ChatError(event["error"].get("message", "unknown"))
            for choice in event.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    yield text
