"""Models that run with transformers' code and our attention give the same results as transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.contract.config import ModelCode
from engine.contract.errors import CheckpointError
from engine.model.registry import load_model_config
from engine.model.transformers_backend.config import build_on_meta
from engine.model.transformers_backend.model import TransformersModel
from engine.model.weights.shards import find_shards
from tests.support.engine.checkpoints import VOCAB_SIZE, edit_config, load_oracle, make_checkpoint, oracle_logits
from tests.support.engine.model_harness import ModelHarness
from tests.support.engine.transformers_families import TRANSFORMERS_FAMILIES, WINDOW

TOLERANCE = 2e-4
"""Relative to the largest logit."""

BLOCK_SIZE = 7
NUM_TOKENS = 121
BY_TRANSFORMERS = ModelCode(impl="transformers")


def _tokens(num_tokens: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return [int(token) for token in torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)]


def _assert_says_the_same(path: Path) -> ModelHarness:
    """Compare a whole prompt, and the same in chunks and then token by token, while another sequence runs."""
    expected = oracle_logits(load_oracle(path), _tokens())
    harness = ModelHarness(path, block_size=BLOCK_SIZE, model_impl="transformers")
    (whole,) = harness.run((harness.start(_tokens()), NUM_TOKENS))
    sequence, beside = harness.start(_tokens()), harness.start(_tokens()[::-1])
    counts = (3, 2 * BLOCK_SIZE - 3, WINDOW - 2 * BLOCK_SIZE, NUM_TOKENS - WINDOW - 6, *[1] * 6)
    parts = [harness.run((beside, 5), (sequence, count))[1] for count in counts]
    allowed = TOLERANCE * expected.abs().max().item()
    assert (whole - expected).abs().max().item() < allowed
    assert (torch.cat(parts) - expected).abs().max().item() < allowed
    return harness


@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_logits_of_a_sharded_checkpoint(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family, max_shard_size="100KB")
    assert len(find_shards(path)) > 2
    _assert_says_the_same(path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "olmo3", "gemma2", "gpt_oss", "qwen3_moe"])
def test_what_is_computed_natively_is_computed_so_too(tmp_path: Path, family: str) -> None:
    """Windows, caps on scores, sinks and experts reach our attention and products."""
    path = make_checkpoint(tmp_path, family)
    native, by_transformers = load_model_config(path), load_model_config(path, BY_TRANSFORMERS)
    _assert_says_the_same(path)
    assert by_transformers.kv_cache_groups == native.kv_cache_groups
    for ours, theirs in zip(native.attention, by_transformers.attention, strict=True):
        assert (theirs.window, theirs.softcap, theirs.has_sinks) == (ours.window, ours.softcap, ours.has_sinks)
        assert theirs.scale == pytest.approx(ours.scale)


@pytest.mark.parametrize("family", ["llama", "stablelm", "olmo"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_heads_and_others(tmp_path: Path, family: str, is_tied: bool) -> None:
    _assert_says_the_same(make_checkpoint(tmp_path, family, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("family", ["exaone4", "cohere2", "vaultgemma"])
def test_layers_with_windows_are_groups_of_their_own(tmp_path: Path, family: str) -> None:
    groups = load_model_config(make_checkpoint(tmp_path, family)).kv_cache_groups
    assert {group.window for group in groups} == {None, WINDOW}


def test_projections_of_one_input_are_one_product(tmp_path: Path) -> None:
    harness = ModelHarness(make_checkpoint(tmp_path, "olmo"), model_impl="transformers")
    assert isinstance(harness.model, TransformersModel)
    products = {tuple(name.rpartition(".")[2] for name in names) for names in harness.model.replaced.products}
    assert products == {("q_proj", "k_proj", "v_proj"), ("o_proj",), ("lm_head",)}, "its MLPs are ours whole"


def test_native_architectures_and_others_are_told_apart(tmp_path: Path) -> None:
    llama, arcee = make_checkpoint(tmp_path / "a", "llama"), make_checkpoint(tmp_path / "b", "arcee")
    assert type(load_model_config(llama)).__name__ == "ModelConfig"
    assert type(load_model_config(llama, BY_TRANSFORMERS)).__name__ == "TransformersConfig"
    assert type(load_model_config(arcee)).__name__ == "TransformersConfig"
    with pytest.raises(CheckpointError, match="architecture ArceeForCausalLM is not supported natively"):
        load_model_config(arcee, ModelCode(impl="native"))


def test_transformers_is_not_imported_for_a_native_architecture(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    program = (
        "import sys; from pathlib import Path; from engine.model.registry import load_model_config; "
        f"load_model_config(Path({str(path)!r})); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state spaces": (
        "mamba",
        {**_SMALL, "max_position_embeddings": 64},
        "layer_types linear_attention are not supported",
    ),
    "convolutions": ("lfm2", {**_SMALL, "layer_types": ["conv", "full_attention"]}, "layer_types conv"),
    "an encoder": ("bart", {"vocab_size": 64}, "an encoder and a decoder"),
    "pictures": ("llava", {}, r"several parts \(text_config, vision_config\)"),
    "biases for distances": ("bloom", {**_SMALL, "max_position_embeddings": 64}, "cannot be followed"),
    "two values for one key": ("diffllama", {**_SMALL, "max_position_embeddings": 64}, "several times for one token"),
    "chunks": (
        "llama4_text",
        {**_SMALL, "attention_chunk_size": 16},
        "layer_types chunked_attention are not supported",
    ),
    "frequencies by length": (
        "arcee",
        {**_SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "rope_type dynamic",
    ),
    "values of another size": ("youtu", {**_SMALL, "max_position_embeddings": 64}, "not heads of one size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, what: str) -> None:
    model_type, fields, message = REFUSED[what]
    config = AutoConfig.for_model(model_type, **fields)
    config.save_pretrained(tmp_path)
    if model_type in ("mamba", "bloom", "arcee", "diffllama", "youtu"):
        with torch.device("meta"):
            edit_config(tmp_path, architectures=[type(AutoModelForCausalLM.from_config(config)).__name__])
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_code_of_a_checkpoint_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "arcee")
    source = Path(sys.modules[type(load_oracle(path)).__module__].__file__ or "")
    text = (
        source.read_text()
        .replace("from ...", "from transformers.")
        .replace("from .configuration_arcee", "from transformers")
    )
    edit_config(path, auto_map={"AutoModelForCausalLM": "modeling_own.ArceeForCausalLM"})
    (path / "modeling_own.py").write_text(f"{text}\nArceeForCausalLM.is_own = True\n")
    assert not hasattr(type(build_on_meta(path, trust_remote_code=False)), "is_own")
    assert hasattr(type(build_on_meta(path, trust_remote_code=True)), "is_own")
    shape = load_model_config(path, ModelCode(trust_remote_code=True))
    assert shape.architecture == "ArceeForCausalLM"


def test_code_of_a_checkpoint_that_transformers_does_not_know_needs_trust(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "arcee")
    edit_config(path, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.ArceeForCausalLM"})
    with pytest.raises(CheckpointError, match=r"model_type own.*runs only with trust_remote_code"):
        load_model_config(path)


@pytest.mark.parametrize("name", ["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"])
def test_transformers_own_code_serves_what_came_with_code_first(tmp_path: Path, name: str) -> None:
    """As ERNIE 4.5 was published: its own code had another name, and transformers has supported the model since."""
    path = make_checkpoint(tmp_path / "own", "ernie4_5")
    auto_map = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": f"modeling_own.{name}"}
    edit_config(path, architectures=[name], auto_map=auto_map)
    expected = oracle_logits(load_oracle(make_checkpoint(tmp_path / "plain", "ernie4_5")), _tokens())

    harness = ModelHarness(path)
    (logits,) = harness.run((harness.start(_tokens()), NUM_TOKENS))

    assert (logits - expected).abs().max().item() < TOLERANCE * expected.abs().max().item()


@pytest.mark.parametrize("name", ["Ernie4_5Model", "Ernie4_5ForRewards", "LlamaForCausalLM"])
def test_another_architecture_than_the_one_that_generates_is_refused(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, "ernie4_5")
    edit_config(path, architectures=[name])
    with pytest.raises(CheckpointError, match=f"architecture {name} generates no text; Ernie4_5ForCausalLM would"):
        load_model_config(path, BY_TRANSFORMERS)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "arcee")
    edit_config(path, quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match=r"quantized weights \(awq\) are not supported"):
        load_model_config(path)


def _change_weights(path: Path, **changes: torch.Tensor | None) -> None:
    weights = {**load_file(path / "model.safetensors"), **changes}
    save_file(
        {name: tensor for name, tensor in weights.items() if tensor is not None},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, f"1 missing tensors, first {NORM}"),
        (
            {"model.other.weight": torch.ones(3)},
            "holds tensor model.other.weight, which does not belong to the architecture in config.json",
        ),
        ({NORM: torch.ones(3)}, "its weights do not fit"),
        ({NORM: torch.ones(64, dtype=torch.int8)}, f"tensor {NORM} has dtype I8; quantized weights are not supported"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = make_checkpoint(tmp_path, "arcee")
    _change_weights(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        ModelHarness(path)


def test_shard_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "arcee")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged or truncated"):
        ModelHarness(path)


def test_checkpoint_without_the_head_loads(tmp_path: Path) -> None:
    """Saved from the model inside, whose tensors lack the prefix."""
    path = make_checkpoint(tmp_path / "model", "stablelm", tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    bare = tmp_path / "bare"
    shutil.copytree(path, bare)
    stored = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(stored, bare / "model.safetensors", metadata={"format": "pt"})
    (expected,) = (harness := ModelHarness(path)).run((harness.start(_tokens()), NUM_TOKENS))
    (logits,) = (harness := ModelHarness(bare)).run((harness.start(_tokens()), NUM_TOKENS))
    assert torch.equal(logits, expected)


def test_config_of_the_shape_says_what_caches_need(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "ernie4_5")
    raw = json.loads((path / "config.json").read_text())
    shape = load_model_config(path)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.vocab_size, shape.hidden_size, shape.num_layers) == (VOCAB_SIZE, 64, 3)
    assert shape.max_model_len == raw["max_position_embeddings"]


def test_no_file_of_weights_is_held_in_memory(tmp_path: Path) -> None:
    """A tensor that is mapped from a file keeps all pages of the file, including those of tensors that were packed
    elsewhere.
    """
    path = make_checkpoint(tmp_path, "stablelm")
    harness = ModelHarness(path, model_impl="transformers")
    assert isinstance(harness.model, TransformersModel)
    assert str(path) not in Path("/proc/self/maps").read_text()
