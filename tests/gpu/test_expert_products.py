"""Products of many experts on a GPU, by torch's grouped product and by the kernel in Triton: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from engine.layers.experts.products import ExpertsPacker, GroupedProducts, pack_experts
from engine.layers.experts.triton_product import TritonProducts

pytestmark = pytest.mark.gpu

COUNTS = (0, 3, 0, 40, 1, 130)


@pytest.mark.parametrize(
    ("packer", "dtype"),
    [
        (TritonProducts, torch.float16),
        (TritonProducts, torch.bfloat16),
        (GroupedProducts, torch.bfloat16),
        (pack_experts, torch.float16),
    ],
)
def test_rows_are_multiplied_with_the_matrix_of_their_expert(packer: ExpertsPacker, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(len(COUNTS), 192, 128, generator=generator) / 128**0.5).to(dtype)
    bias = torch.randn(len(COUNTS), 192, generator=generator).to(dtype)
    experts = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    rows = torch.randn(len(experts), 128, generator=generator).to(dtype)
    products = packer(weight.cuda(), bias.cuda())

    found = products(rows.cuda(), experts.cuda()).cpu()

    matrices, added = weight.float()[experts], bias.float()[experts]
    expected = torch.einsum("ni,noi->no", rows.float(), matrices) + added
    torch.testing.assert_close(found.float(), expected, atol=5e-2, rtol=2e-2)
    if packer is TritonProducts:
        assert torch.equal(products(rows[20:].cuda(), experts[20:].cuda()).cpu(), found[20:])
