"""config.json is read as its authors meant it, and what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contract.errors import CheckpointError
from engine.layers.rope_config import RopeType
from engine.model.registry import ARCHITECTURES, parse_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**BASE, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["OPTForCausalLM"]},
            "architecture OPTForCausalLM is not supported natively; supported: Deepseek",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq\) are not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive integer, got '4'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"torch_dtype": "float64"}, "dtype float64 is not supported; supported: float32, bfloat16, float16"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope type 'proportional' is not supported; supported: defa"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type longrope needs short_factor, long_factor"),
        (
            {"rope_scaling": {"rope_type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 9}},
            "long_factor has 9 numbers, but 8 pairs of a head are rotated",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layer types"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn", "factor": 8.0}},
            "rope type longrope needs short_factor, long_factor",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 is more than the 4 experts",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 0}, "num_experts must be a positive integer, got 0"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [True]},
            r"mlp_only_layers must be a list of layer numbers, got \[True\]",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
            r"quantized weights \(mxfp4\) are not supported",
        ),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "quantization_config": {"quant_method": "mxfp4"},
                "intermediate_size": 80,
            },
            "intermediate_size 80 is no multiple of 32, the numbers in a block of mxfp4",
        ),
    ],
)
def test_refusals_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_model_config(_config(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number, got 0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0 is not supported"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must name one of"),
        ("GraniteForCausalLM", {"residual_multiplier": "1"}, "residual_multiplier must be a positive number, got '1'"),
        (
            "Phi3ForCausalLM",
            {"partial_rotary_factor": 0.3125},
            r"0\.3125 does not give an even number of the 16 dimensions of a head",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers, but there are 4"),
        ("GPT2LMHeadModel", {}, "n_embd is missing"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta where it must name full_attention"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention is not supported"),
    ],
)
def test_refusals_of_an_architecture_of_its_own(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_model_config(_config(architectures=[architecture], **changes))


def test_the_refusal_of_an_architecture_lists_every_supported_one() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(_config(architectures=["OPTForCausalLM"]))
    assert all(name in str(caught.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096, 4096)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (8, None, None, 8),
        ),
        ("MixtralForCausalLM", {}, (None, None, None, None)),
        ("MixtralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (8, 8, 8, 8)),
        ("GptOssForCausalLM", {}, (128, None, 128, None)),
        ("GptOssForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, (None, None, None, None)),
    ],
)
def test_windows_of_the_layers(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = parse_model_config(_config(architectures=[architecture]) | changes)
    assert tuple(spec.window for spec in config.attention) == windows


def test_layers_with_experts_are_those_that_are_not_named_and_every_so_many() -> None:
    raw = _config(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=6, decoder_sparse_step=2)
    config = parse_model_config(raw | {"mlp_only_layers": [3], "moe_intermediate_size": 32, "num_experts": 16})
    assert [spec is not None for spec in config.experts] == [False, True, False, False, False, True]
    assert config.mlp_size == 8 * (2 * 32 + 64)


@pytest.mark.parametrize(("architecture", "width"), [("LlamaForCausalLM", 2 * 96), ("Starcoder2ForCausalLM", 96)])
def test_a_plain_mlp_holds_what_its_first_product_makes(architecture: str, width: int) -> None:
    raw = _config(architectures=[architecture], intermediate_size=96, hidden_act="gelu_pytorch_tanh")
    assert parse_model_config(raw).mlp_size == width


def test_layers_whose_window_no_sequence_outgrows_share_blocks_with_those_that_see_everything() -> None:
    raw = _config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, max_window_layers=3)
    assert [group.window for group in parse_model_config(raw | {"sliding_window": 512}).kv_cache_groups] == [None]
    mixed = parse_model_config(raw | {"sliding_window": 511}).kv_cache_groups
    assert [group.window for group in mixed] == [None, None, None, 511]


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Olmo2ForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("Olmo3ForCausalLM", {}, (4096, 4096, 4096, None)),
        ("Olmo3ForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        ("Phi3ForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Phi3ForCausalLM", {}, (None,) * 4),
        ("Starcoder2ForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, (8, None, 8, None)),
        ("Gemma3ForCausalLM", {}, (4096,) * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        ("SmolLM3ForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("SmolLM3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None, 8)),
    ],
)
def test_windows_of_further_architectures(
    architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = parse_model_config(_config(architectures=[architecture], **changes))
    assert tuple(spec.window for spec in config.attention) == windows


def test_longrope_has_the_factors_of_the_length_that_is_served() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = parse_model_config(
        _config(
            architectures=["Phi3ForCausalLM"],
            max_position_embeddings=4096,
            original_max_position_embeddings=512,
            rope_scaling=scaling,
        )
    )
    assert config.max_model_len == 4096
    ropes = [config.for_length(length).ropes[0] for length in (512, 513)]
    assert [rope and rope.pair_factors[0] for rope in ropes] == [1.0, 4.0]
    assert ropes[0] != ropes[1], "engines of different lengths share no cache"


@pytest.mark.parametrize("layer_types", [["full_attention"], ["chunked_attention"] * 4])
def test_layer_types_that_make_no_sense(layer_types: list[str]) -> None:
    config = _config(
        architectures=["Qwen2ForCausalLM"], sliding_window=8, use_sliding_window=True, layer_types=layer_types
    )
    with pytest.raises(CheckpointError, match="layer_types must name one of full_attention, sliding_attention"):
        parse_model_config(config)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
    ],
)
def test_the_longest_sequence(scaling: dict[str, Any] | None, length: int) -> None:
    assert parse_model_config(_config(rope_scaling=scaling)).max_model_len == length


def test_defaults_that_follow_from_other_fields() -> None:
    config = parse_model_config(_config(num_key_value_heads=None))
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "float32")
    assert (config.attention[0].rope.rope_type, config.attention[0].rope.theta) == (RopeType.DEFAULT, 10000.0)
