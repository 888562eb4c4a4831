"""Packed products: the plain ones' values for every number of tokens, with few kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from engine.device.allocation import MAX_KERNELS
from engine.layers.packed_weight import EXPECTED_NUM_TOKENS, _multiply_packed, _ops, _rounded, can_pack

GROWTH = """
import ctypes, json, random, sys
import torch
from engine.layers.packed_weight import EXPECTED_NUM_TOKENS, _multiply_packed, _ops
from engine.device.allocation import bound_kernel_caches

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
torch.set_num_threads(1)
if sys.argv[1] == "ours":
    bound_kernel_caches()
packed = [_ops().reorder(torch.randn(256, 128), EXPECTED_NUM_TOKENS) for _ in range(2)]
before = mallinfo().uordblks
sizes = random.Random(1).sample(range(1, 2049), 700)
for size in sizes:
    x = torch.randn(size, 128)
    for weight in packed:
        if sys.argv[1] == "ours":
            _multiply_packed(weight, None, x)
        else:
            _ops().multiply(x, weight, None, "none", [], "")
del x
print(json.dumps((mallinfo().uordblks - before) / 2**20))
"""
"""Multiplies 700 numbers of tokens, and tells how many MiB are in use since."""


@pytest.mark.parametrize("num_tokens", [1, 32, 33, 128, 129, 500, 1000])
def test_product_of_a_rounded_number_of_tokens_is_the_plain_one(num_tokens: int) -> None:
    if not can_pack(torch.float32):
        pytest.fail("this machine packs no weights: nothing here was tested")
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(num_tokens, 64)

    product = _multiply_packed(_ops().reorder(weight, EXPECTED_NUM_TOKENS), bias, x)

    assert product.shape == (num_tokens, 96)
    assert product.is_contiguous()
    torch.testing.assert_close(product, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_numbers_of_tokens_are_rounded_to_few_and_by_little() -> None:
    rounded = [_rounded(number) for number in range(1, 2049)]

    assert rounded[:32] == list(range(1, 33))
    assert all(number <= more <= 1.125 * number for number, more in enumerate(rounded, start=1))
    # Five kinds of products in a model: those of all batches and prompts fit into the caches together.
    assert 5 * len(set(rounded)) <= MAX_KERNELS


def _growth_mib(whose: str) -> float:
    done = subprocess.run([sys.executable, "-c", GROWTH, whose], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def test_prompts_of_all_lengths_leave_little_memory_in_use() -> None:
    plain, ours = _growth_mib("plain"), _growth_mib("ours")

    assert plain > 100
    assert ours < plain / 3
