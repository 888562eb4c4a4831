"""`baton generate`: one engine in this process, without Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from cluster.config.config_file import load_config
from cluster.config.served_model import served_model
from cluster.plan.placement import usable_cores
from cluster.plan.preflight import check_checkpoint, check_device
from engine.build import build_engine
from engine.contract.checkpoint.end_tokens import read_end_tokens
from engine.contract.config import DeviceName, DTypeName, EngineConfig, ModelCode, ModelConfigSource, ModelImplName
from engine.contract.errors import ConfigError, RequestRefusedError
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import run_requests
from engine.model.registry import load_model_config
from router.text.chat_template import ChatTemplateError
from router.text.detokenizer import DetokenizerFactory
from router.text.template_files import load_chat_templates
from router.text.tokenizer import Tokenizer

REQUEST_ID = "generate"
DEFAULT_MAX_TOKENS = 128
"""The default length. Unlike a requested length, it is cut at the end of the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The command's options."""

    model: Path | None
    prompt: str
    max_tokens: int | None
    temperature: float
    seed: int
    device: DeviceName
    dtype: DTypeName
    model_impl: ModelImplName = "auto"
    is_chat: bool = False


def generate(options: GenerateOptions, output: TextIO) -> None:
    """Write the continuation of the prompt as it is generated.

    Raises:
        ConfigFileError, CheckpointError, ConfigError, PreflightError: The model cannot be loaded, or cannot take this
            prompt.
    """
    path, code = served_model(load_config(None, {"model": options.model})).path, ModelCode(impl=options.model_impl)
    check_checkpoint(path, code)
    check_device(options.device)
    tokenizer = Tokenizer.load(path)
    request = build_request(options, path, tokenizer)
    built = build_engine(
        EngineConfig(
            model=ModelConfigSource(
                path=path, device=options.device, dtype=options.dtype, num_threads=usable_cores(), code=code
            )
        )
    )
    try:
        write_continuation(built.core, request, tokenizer, output)
    finally:
        built.core.close()


def build_request(options: GenerateOptions, path: Path, tokenizer: Tokenizer) -> GenerateRequest:
    """The prompt as token ids, with the model's own end tokens."""
    check_text(options.prompt)
    encode = chat_ids if options.is_chat else text_ids
    prompt_token_ids = encode(options.prompt, path, tokenizer)
    if not options.prompt or not prompt_token_ids:
        raise ConfigError("the prompt is empty: give a text to continue")
    if options.max_tokens is not None:
        limit = load_model_config(path, ModelCode(impl=options.model_impl)).max_model_len
        check_length(len(prompt_token_ids), options.max_tokens, limit)
    return GenerateRequest(
        request_id=REQUEST_ID,
        prompt_token_ids=TokenIds.of(prompt_token_ids),
        sampling=SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            eos_token_ids=read_end_tokens(path),
        ),
    )


def text_ids(text: str, _: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a plain text."""
    return tuple(tokenizer.encode(text))


def chat_ids(question: str, path: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a question in the model's chat template.

    Raises:
        ConfigError: The model has no chat template, or the template refuses this chat.
    """
    templates = load_chat_templates(path, special_tokens=tokenizer.special.named)
    if templates is None:
        raise ConfigError(f"{path} has no chat template: leave --chat out to have the text continued")
    try:
        text = templates.default.render([{"role": "user", "content": question}])
    except ChatTemplateError as error:
        raise ConfigError(f"the model's chat template refuses the prompt: {error}") from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def check_text(prompt: str) -> None:
    """Refuse an argument that is not UTF-8. Python represents its invalid bytes as lone surrogates.

    Raises:
        ConfigError: The argument has a lone surrogate.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 at character {error.start}") from error


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Refuse a requested answer length that cannot fit, as the HTTP API does.

    Raises:
        ConfigError: Prompt and answer together are longer than the model's context.
    """
    total = num_prompt_tokens + max_tokens
    if total > max_model_len:
        raise ConfigError(
            f"the prompt has {num_prompt_tokens} token{'' if num_prompt_tokens == 1 else 's'} and max_tokens is "
            f"{max_tokens}: together {total}, but the model's context length is {max_model_len} tokens"
        )


def write_continuation(core: EngineCore, request: GenerateRequest, tokenizer: Tokenizer, output: TextIO) -> None:
    """Run one request, and write its text."""
    detokenizer = DetokenizerFactory(tokenizer).make(request.prompt_token_ids)
    try:
        for delta in run_requests(core, [request]):
            output.write(detokenizer.push(delta.token_ids))
            output.flush()
    except RequestRefusedError as error:
        raise ConfigError(str(error)) from error
    output.write(detokenizer.finish() + "\n")
