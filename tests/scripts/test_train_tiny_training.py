"""Training: the same from the same seed, through an interruption too; and what it makes is what transformers runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.model.builtin import builtin_model_dir
from scripts.train_tiny.export import WEIGHTS_NAME, export
from scripts.train_tiny.model import ModelConfig, TinyLlama
from scripts.train_tiny.schedule import Schedule
from scripts.train_tiny.tokenizer import load_tokenizer
from scripts.train_tiny.train import CHECKPOINT_NAME, OtherRunError, TrainConfig, Trainer, second_training

SMALL = ModelConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16
)
CONFIG = TrainConfig(
    schedule=Schedule(num_steps=3), tokens_per_step=1024, num_threads=1, compile=False, probes_per_task=1
)


class Interrupted(Schedule):
    """Ends after one step of three."""

    def progress(self, step: int, elapsed_s: float) -> float:
        return 1.0 if step else super().progress(step, elapsed_s)


class Done(Schedule):
    """Ends before its first step."""

    def progress(self, step: int, elapsed_s: float) -> float:
        return 1.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(builtin_model_dir())


def trained(folder: Path, tokenizer: Tokenizer, config: TrainConfig = CONFIG, start: Path | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    try:
        trainer = Trainer(config, SMALL, tokenizer, folder, start)
        trainer.run()
    finally:
        torch.set_num_threads(threads)
    return trainer


def test_run_that_was_interrupted_ends_where_one_that_was_not_does(tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = trained(tmp_path / "whole", tokenizer)
    trained(tmp_path / "parts", tokenizer, replace(CONFIG, schedule=Interrupted(num_steps=3)))

    resumed = trained(tmp_path / "parts", tokenizer)

    assert resumed.state.step == whole.state.step == 3
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_another_seed_sees_other_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = trained(tmp_path / "1", tokenizer)
    second = trained(tmp_path / "2", tokenizer, replace(CONFIG, seed=2))

    assert not torch.equal(first.model.model.embed_tokens.weight, second.model.model.embed_tokens.weight)


def test_a_folder_goes_on_with_the_seed_that_it_was_begun_with(tmp_path: Path, tokenizer: Tokenizer) -> None:
    trained(tmp_path / "run", tokenizer)

    with pytest.raises(OtherRunError, match=r"last\.pt was begun with --seed 1, not 2: .* --out"):
        trained(tmp_path / "run", tokenizer, replace(CONFIG, seed=2))


def weights_file(path: Path, trainer: Trainer) -> Path:
    save_file({name: value.to(torch.bfloat16) for name, value in trainer.model.state_dict().items()}, path)
    return path


def test_second_training_begins_with_the_weights_it_is_given(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = weights_file(tmp_path / WEIGHTS_NAME, trained(tmp_path / "first", tokenizer))
    config = second_training(replace(CONFIG, schedule=Done(num_steps=1)))

    second = trained(tmp_path / "second", tokenizer, config, start)

    for name, value in load_file(start).items():
        assert torch.equal(second.model.state_dict()[name], value.float()), name
    assert config.matrix_lr < CONFIG.matrix_lr


def test_second_training_goes_on_with_the_weights_that_it_was_begun_with(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = trained(tmp_path / "first", tokenizer)
    start = weights_file(tmp_path / "a", first)
    config = second_training(replace(CONFIG, schedule=Schedule(num_steps=1)))
    trained(tmp_path / "second", tokenizer, config, start)

    assert trained(tmp_path / "second", tokenizer, config, start).state.step == 1
    other = weights_file(tmp_path / "b", trained(tmp_path / "other", tokenizer, replace(CONFIG, seed=2)))
    with pytest.raises(OtherRunError, match=r"last\.pt was begun from other weights: .* --from"):
        trained(tmp_path / "second", tokenizer, config, other)


def test_exported_model_is_what_was_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = TinyLlama(ModelConfig(), torch.float32)
    model.load_state_dict(
        {name: value.float() for name, value in load_file(builtin_model_dir() / WEIGHTS_NAME).items()}
    )
    torch.save({"model": model.state_dict()}, tmp_path / CHECKPOINT_NAME)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    token_ids = torch.tensor([tokenizer.encode("The code of the blue fox is 4827. Count from 7 to 15.").ids])

    export(tmp_path / CHECKPOINT_NAME, tmp_path, tmp_path / "exported")

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(token_ids).logits, model(token_ids), atol=1e-3, rtol=1e-3)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        ours, shipped = ((folder / file).read_text() for folder in (tmp_path / "exported", builtin_model_dir()))
        assert json.loads(ours) == json.loads(shipped), file
