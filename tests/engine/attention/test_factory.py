"""What no backend supports is refused before anything is loaded."""

from __future__ import annotations

import dataclasses

import pytest

from engine.attention.factory import check_attention
from engine.contract.errors import ConfigError
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig

PLAIN = AttentionSpec(scale=0.1, rope=RopeConfig(), window=9)
CAPPED = dataclasses.replace(PLAIN, softcap=50.0)
SUNK = dataclasses.replace(PLAIN, has_sinks=True)


@pytest.mark.parametrize(("spec", "missing"), [(CAPPED, "capped attention scores"), (SUNK, "attention sinks")])
def test_a_gpu_refuses_what_its_kernels_do_not_compute(spec: AttentionSpec, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"GemmaForCausalLM needs {missing}.*which no attention kernel for cuda"):
        check_attention("GemmaForCausalLM", [PLAIN, spec], "cuda")


def test_windows_run_everywhere_and_a_cpu_computes_it_all() -> None:
    check_attention("GemmaForCausalLM", [PLAIN], "cuda")
    check_attention("GemmaForCausalLM", [PLAIN, CAPPED, SUNK], "cpu")
