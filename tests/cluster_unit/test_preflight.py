"""What is refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.preflight import check_model_len
from cluster.preflight_error import PreflightError
from engine.builtin import builtin_model_dir
from engine.models.model_config import load_model_config


def test_length_beyond_the_models_is_refused_with_both_numbers() -> None:
    limit = load_model_config(builtin_model_dir()).max_model_len

    with pytest.raises(PreflightError, match=f"max_model_len is {limit + 1}, but .* at most {limit} tokens"):
        check_model_len(limit + 1, builtin_model_dir())


def test_model_length_itself_and_none_are_accepted() -> None:
    limit = load_model_config(builtin_model_dir()).max_model_len

    check_model_len(limit, builtin_model_dir())
    check_model_len(None, builtin_model_dir())
