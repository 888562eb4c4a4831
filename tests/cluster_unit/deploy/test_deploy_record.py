"""The changes that a running cluster allows in place."""

from __future__ import annotations

import dataclasses

from cluster.config.config import BatonConfig
from cluster.deploy.deploy_record import changed_keys, forbidden_changes
from cluster.serve.graph import deployment_version


def test_counts_and_schedulers_may_change() -> None:
    old = BatonConfig()
    new = BatonConfig.model_validate({"decode_replicas": 3, "decode": {"scheduler": {"max_num_seqs": 8}}})

    assert changed_keys(old, new) == ["decode_replicas", "decode"]
    assert forbidden_changes(old, new) == []


def test_what_tokens_depend_on_may_not() -> None:
    changes = forbidden_changes(BatonConfig(), BatonConfig(dtype="float16", served_model_name="other"))

    assert (
        forbidden_changes(BatonConfig(served_model_name="mine"), BatonConfig(served_model_name=("mine", "yours"))) == []
    ), "another name is no harm"
    assert sorted(changes) == ["dtype: auto -> float16", "served_model_name: null -> other"]


def test_where_it_is_deployed_is_no_change() -> None:
    assert changed_keys(BatonConfig(), BatonConfig(address="auto", port=9000, startup_timeout_s=1)) == []


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int


def test_equal_settings_have_one_version_and_others_another() -> None:
    assert deployment_version(Settings(1)) == deployment_version(Settings(1))
    assert deployment_version(Settings(1)) != deployment_version(Settings(2))
