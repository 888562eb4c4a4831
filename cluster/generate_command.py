"""`baton generate`: one engine in this process, without Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from cluster.placement import usable_cores
from cluster.preflight import check_checkpoint, check_device
from engine.build import build_engine
from engine.builtin import builtin_model_dir
from engine.config import DeviceName, DTypeName, EngineConfig, ModelConfigSource
from engine.engine_core import EngineCore
from engine.errors import ConfigError, RequestRefusedError
from engine.messages import GenerateRequest, SamplingParams
from engine.offline import run_requests
from router.text.detokenizer import DetokenizerFactory
from router.text.generation_config import load_generation_defaults
from router.text.tokenizer import Tokenizer

REQUEST_ID = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The command's options."""

    model: Path | None
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    device: DeviceName
    dtype: DTypeName


def generate(options: GenerateOptions, output: TextIO) -> None:
    """Write the continuation of the prompt as it comes.

    Raises:
        CheckpointError, ConfigError, PreflightError: The model cannot be loaded, or cannot take this prompt.
    """
    path = options.model.expanduser().absolute() if options.model is not None else builtin_model_dir()
    check_checkpoint(path)
    check_device(options.device)
    tokenizer = Tokenizer.load(path)
    request = build_request(options, path, tokenizer)
    built = build_engine(
        EngineConfig(
            model=ModelConfigSource(path=path, device=options.device, dtype=options.dtype, num_threads=usable_cores())
        )
    )
    try:
        write_continuation(built.core, request, tokenizer, output)
    finally:
        built.core.close()


def build_request(options: GenerateOptions, path: Path, tokenizer: Tokenizer) -> GenerateRequest:
    """The prompt as token ids, with the model's own end tokens."""
    prompt_token_ids = tuple(tokenizer.encode(options.prompt))
    if not prompt_token_ids:
        raise ConfigError("the prompt is empty: there is nothing to continue")
    return GenerateRequest(
        request_id=REQUEST_ID,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            eos_token_ids=load_generation_defaults(path, tokenizer).eos_token_ids,
        ),
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
