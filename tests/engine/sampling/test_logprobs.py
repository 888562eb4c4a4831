"""Log-probabilities against torch's own log-softmax of the untouched logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.contract.messages import SamplingParams
from engine.sampling.logprobs import compute_logprobs
from tests.support.engine.sampler_rig import SamplerRig, on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 3, 500])
def test_table_is_the_log_softmax(dtype: torch.dtype, num_top: int) -> None:
    logits = (torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    chosen = torch.tensor([0, 7, 49, 7])

    table = on_host(compute_logprobs(logits, chosen, num_top))

    expected = torch.log_softmax(logits.double(), dim=1)
    best = expected.sort(dim=1, descending=True, stable=True).values
    width = min(num_top, 50)
    np.testing.assert_array_equal(table.token_ids[:, 0], chosen)
    np.testing.assert_allclose(table.logprobs[:, 0], expected[torch.arange(4), chosen], atol=1e-5)
    np.testing.assert_allclose(table.logprobs[:, 1:], best[:, :width], atol=1e-5)
    np.testing.assert_allclose(
        table.logprobs[:, 1:], expected.gather(1, torch.from_numpy(table.token_ids[:, 1:]).long()), atol=1e-5
    )
    ranks = [int((expected[row] > expected[row, token]).sum()) + 1 for row, token in enumerate(chosen)]
    assert table.ranks.tolist() == ranks


def test_logprobs_are_the_models_own_whatever_the_request_changes() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2)) * 3
    rig = SamplerRig()
    params = SamplingParams(
        max_tokens=9,
        temperature=0.7,
        seed=3,
        repetition_penalty=1.7,
        logit_bias=((4, 50.0),),
        bad_words=((5,),),
        num_logprobs=2,
    )
    rig.set(0, params, prompt=(1, 2), output=(4, 4))

    sampled = rig.sample(logits, [0])

    assert sampled.logprobs is not None
    entry = sampled.logprobs.table.entry(0, 2)
    expected = torch.log_softmax(logits[0], dim=0)
    assert entry.token_ids == (4, *expected.topk(2).indices.tolist())
    assert entry.logprobs == pytest.approx([expected[token].item() for token in entry.token_ids], abs=1e-5)


def test_only_rows_that_ask_get_any() -> None:
    rig = SamplerRig()
    for row, num in enumerate((None, 0, None, 4)):
        rig.set(row, SamplingParams(max_tokens=9, num_logprobs=num), prompt=(1,))

    asked = rig.sample(torch.randn(4, 20), [0, 1, 2, 3])
    nobody = rig.sample(torch.randn(2, 20), [0, 2])

    assert nobody.logprobs is None
    assert asked.logprobs is not None
    assert asked.logprobs.rows.tolist() == [1, 3]
    assert asked.logprobs.table.token_ids[:, 0].tolist() == asked.token_ids[[1, 3]].tolist()


def test_nan_and_infinite_logits_give_finite_or_minus_infinite_values() -> None:
    logits = torch.tensor([[0.0, math.nan, -math.inf, 1.0]])

    table = on_host(compute_logprobs(logits, torch.tensor([3]), 4))

    assert not np.isnan(table.logprobs).any()
    assert table.logprobs[0, 0] == pytest.approx(math.log(math.e / (1 + math.e)), abs=1e-5)
