"""The tokenizer of the random model that is served beside a peer."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.random_llama import VOCAB_SIZE, name_all_tokens
from engine.model.builtin import builtin_model_dir


def test_every_token_of_the_model_has_a_text_of_its_own(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model_dir() / name, tmp_path)

    name_all_tokens(tmp_path)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    builtin = AutoTokenizer.from_pretrained(builtin_model_dir())
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode([VOCAB_SIZE - 2, VOCAB_SIZE - 1]) == f" word{VOCAB_SIZE - 2} word{VOCAB_SIZE - 1}"
    assert tokenizer.encode("the red fox counts to 12") == builtin.encode("the red fox counts to 12")
