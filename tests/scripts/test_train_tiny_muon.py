"""Our Muon takes the same steps as torch's, up to the rounding of bfloat16."""

import pytest
import torch
from torch import nn

from scripts.train_tiny.muon import Muon

SHAPES = ((16, 16), (8, 24), (24, 8), (24, 8))


def steps_of(kind: type[torch.optim.Muon], **options: object) -> list[torch.Tensor]:
    """Where parameters are after a few steps with gradients that are the same for every optimizer."""
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]
    optimizer = kind(parameters, lr=0.1, weight_decay=0.01, **options)  # type: ignore[arg-type]
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(*parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    expected = steps_of(torch.optim.Muon, adjust_lr_fn="original")

    for ours, theirs in zip(steps_of(Muon, dtype=dtype), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.0)


def test_parameter_without_gradient_stays() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))

    Muon([parameter], dtype=torch.float32, lr=0.1, weight_decay=0.5).step()

    assert torch.equal(parameter, torch.ones(4, 4))
