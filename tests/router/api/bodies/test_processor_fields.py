"""A logits processor that nobody knows but this file: what it declares is all that brings its fields to the sampler."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from pydantic import Field

from engine.contract.messages import SamplingParams
from engine.contract.request_fields import Vocabulary, request_field
from engine.contract.step import IntArray
from engine.sampling.processors.processor import FOREVER, NEVER
from engine.sampling.processors.registry import PROCESSORS
from engine.sampling.token_history import TokenHistory
from tests.support.engine.sampler_rig import SamplerRig
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import write_model_dir

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
}


async def _read_letters(given: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    rows = await vocabulary.encode(list(given))
    return tuple(dict.fromkeys(token for row in rows for token in row))


@dataclass(frozen=True, kw_only=True)
class FavourParams:
    """``favoured_letters`` are worth ``favour`` more than others."""

    __slots__ = ()

    favour: float = request_field(0.0, Annotated[float, Field(ge=0.0, le=50.0)], in_generation_config=True)
    favoured_letters: tuple[int, ...] = request_field(
        (), Annotated[str, Field(min_length=1, max_length=9)], read=_read_letters
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WithFavour(SamplingParams, FavourParams):
    """Additional parameters of requests in these tests."""


class Favour:
    """The processor."""

    def __init__(self, max_num_seqs: int) -> None:
        self._asked: dict[int, WithFavour] = {}

    def set(self, row: int, sampling: SamplingParams, *, num_prompt_tokens: int) -> int:
        """See ``LogitsProcessor``."""
        assert isinstance(sampling, WithFavour)
        self._asked[row] = sampling
        return FOREVER if sampling.favour and sampling.favoured_letters else NEVER

    def reads_history(self, row: int) -> bool:
        """See ``LogitsProcessor``."""
        return False

    def apply(self, logits: torch.Tensor, rows: IntArray, positions: IntArray, history: TokenHistory) -> None:
        """See ``LogitsProcessor``."""
        for index, row in enumerate(rows.tolist()):
            asked = self._asked[row]
            logits[index, list(asked.favoured_letters)] += asked.favour


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir, params=WithFavour) as rig:
        yield rig


def drawn(sampling: SamplingParams, vocab_size: int) -> int:
    """The token that follows logits that grow with the token's id, at a worker that gets these parameters as bytes."""
    sampler = SamplerRig(processors=(*PROCESSORS, Favour))
    sampler.set(0, pickle.loads(pickle.dumps(sampling)), prompt=(1,))
    logits = torch.from_numpy(np.arange(vocab_size, dtype=np.float32)) / vocab_size
    return int(sampler.sample(logits[None], [0]).token_ids[0])


@pytest.mark.parametrize("url", BODIES)
async def test_a_field_goes_from_every_endpoint_to_the_sampler(rig: RouterRig, url: str) -> None:
    letter = rig.service.tokenizer.encode_all(["e"], add_special_tokens=False)[0][0]
    fields = {"favour": 30, "favoured_letters": "e", "temperature": 0.0}

    answer = await rig.client.post(url, json={**BODIES[url], **fields})

    assert answer.status_code == 200, answer.text
    sampling = rig.prefill[0].seen[-1].sampling
    assert isinstance(sampling, WithFavour)
    assert (sampling.favour, sampling.favoured_letters) == (30.0, (letter,))
    vocab_size = rig.service.vocab_size()
    assert drawn(sampling, vocab_size) == letter != drawn(WithFavour(max_tokens=1), vocab_size) == vocab_size - 1


@pytest.mark.parametrize("url", BODIES)
async def test_limits_are_held_and_documented(rig: RouterRig, url: str) -> None:
    refused = await rig.client.post(url, json={**BODIES[url], "favour": 51})

    assert refused.status_code == 400
    assert "favour" in refused.json()["error"]["message"]
    assert rig.prefill[0].seen == []
    content = rig.app.openapi()["paths"][url]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"]["properties"]["favour"]["anyOf"] == [
        {"type": "number", "minimum": 0.0, "maximum": 50.0},
        {"type": "null"},
    ]


async def test_what_a_body_does_not_say_the_model_or_the_declaration_does(rig: RouterRig, tmp_path: Path) -> None:
    await rig.complete([5], max_tokens=1, favour=None)
    model_dir = write_model_dir(tmp_path)
    (model_dir / "generation_config.json").write_text('{"favour": 2.5, "repetition_penalty": 1.25}')
    async with router_rig(model_dir, params=WithFavour) as other:
        await other.complete([5], max_tokens=1)
        sampling = other.prefill[0].seen[-1].sampling

    assert rig.prefill[0].seen[-1].sampling.favour == 0.0  # type: ignore[attr-defined]
    assert isinstance(sampling, WithFavour)
    assert (sampling.favour, sampling.favoured_letters, sampling.repetition_penalty) == (2.5, (), 1.25)


@pytest.mark.parametrize("url", BODIES)
async def test_without_its_declaration_a_field_is_refused(model_dir: Path, url: str) -> None:
    async with router_rig(model_dir) as rig:
        refused = await rig.client.post(url, json={**BODIES[url], "favour": 3})

        assert refused.status_code == 400
        assert "favour" in refused.json()["error"]["message"]
