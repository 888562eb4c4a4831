"""The built-in model answers from its KV: a damaged block loses the fact in it, and recovery brings it back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.build import BuiltEngine, build_engine
from engine.contract.checkpoint.end_tokens import read_end_tokens
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import step_or_wait
from engine.model.builtin import builtin_model_dir
from kv_transfer.connector import ConnectorBuilder
from kv_transfer.options import ConnectorOptions
from router.text.template_files import load_chat_templates
from router.text.tokenizer import Tokenizer
from tests.support.engine.cache_blocks import read_block, write_block
from tests.support.engine.disaggregated import CoreBuilder, joined_cores

MODEL = builtin_model_dir()
CODE = "4827"
PROMPT = (
    "The code of the red bear is 1356. The code of the blue fox is 4827. The code of the green owl is 9041. "
    "What is the code of the blue fox?"
)
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def request_for_code(tokenizer: Tokenizer) -> GenerateRequest:
    templates = load_chat_templates(MODEL, special_tokens=tokenizer.special.named)
    assert templates is not None
    text = templates.default.render([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    return GenerateRequest(
        request_id="recall",
        prompt_token_ids=TokenIds.of(tokenizer.encode(text, add_special_tokens=False)),
        sampling=SamplingParams(max_tokens=24, eos_token_ids=read_end_tokens(MODEL)),
    )


def blocks_of_the_code(tokenizer: Tokenizer, prompt: tuple[int, ...]) -> list[int]:
    """The blocks, counted along the prompt, in which the digits of the code lie."""
    end = next(count for count in range(len(prompt)) if CODE in tokenizer.decode(prompt[:count]))
    return sorted({position // BLOCK_SIZE for position in range(end - len(CODE), end)})


def answer(tokenizer: Tokenizer, request: GenerateRequest, *, num_damaged: int, checksums: bool) -> tuple[str, int]:
    """The pair's answer if the blocks of the code are damaged after the prefill, and the number of recomputed
    tokens.
    """
    built: dict[str, BuiltEngine] = {}

    def builder(name: str) -> CoreBuilder:
        def build(build_connector: ConnectorBuilder) -> EngineCore:
            config = EngineConfig(
                model=ModelConfigSource(path=MODEL, device="cpu"),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=256),
            )
            built[name] = build_engine(config, build_connector=build_connector)
            return built[name].core

        return build

    options = ConnectorOptions(connector="inproc", checksums=checksums)
    with joined_cores(builder("prefill"), builder("decode"), options) as (prefill, decode):
        prefill.add_request(replace(request, hand_over=True))
        first = next(delta for delta in step_or_wait(prefill) if delta.finish_reason is FinishReason.HANDED_OVER)
        assert first.kv_transfer is not None
        executor = built["prefill"].executor
        assert isinstance(executor, SingleProcessExecutor)
        cache = executor.runner.kv_cache
        for place in blocks_of_the_code(tokenizer, request.prompt_token_ids)[:num_damaged]:
            block_id = first.kv_transfer.block_ids[0][place]
            write_block(cache, block_id, bytes(len(read_block(cache, block_id))))
        decode.add_request(replace(request, output_token_ids=first.token_ids, kv_transfer=first.kv_transfer))
        tokens = list(first.token_ids)
        while decode.has_unfinished():
            for delta in step_or_wait(decode):
                tokens.extend(delta.token_ids)
        return tokenizer.decode(tokens), decode.stats().scheduler.recomputed_tokens


def test_the_fact_is_recalled_from_kv_that_arrived_whole(
    tokenizer: Tokenizer, request_for_code: GenerateRequest
) -> None:
    text, num_recomputed = answer(tokenizer, request_for_code, num_damaged=0, checksums=False)

    assert CODE in text
    assert num_recomputed == 0


def test_the_fact_is_lost_with_its_block_when_nobody_checks(
    tokenizer: Tokenizer, request_for_code: GenerateRequest
) -> None:
    text, _ = answer(tokenizer, request_for_code, num_damaged=1, checksums=False)

    assert CODE not in text


def test_with_checksums_the_block_is_computed_again_and_the_fact_recalled(
    tokenizer: Tokenizer, request_for_code: GenerateRequest
) -> None:
    text, num_recomputed = answer(tokenizer, request_for_code, num_damaged=1, checksums=True)

    assert CODE in text
    assert 0 < num_recomputed <= 2 * BLOCK_SIZE
