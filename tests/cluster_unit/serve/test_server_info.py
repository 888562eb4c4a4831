"""The parts of the configuration that /server_info shows and hides."""

from __future__ import annotations

import json
import threading
from importlib.metadata import version

from ray.exceptions import RayError

from cluster.config.config import BatonConfig
from cluster.config.served_model import served_model
from cluster.serve.server_info import ServerFacts, effective, versions
from router.security import hash_key, new_key


def test_settings_are_told_as_they_work() -> None:
    config = BatonConfig.model_validate(
        {
            "served_model_name": ["mine", "yours"],
            "scheduler": {"max_num_seqs": 64},
            "decode": {"scheduler": {"max_num_seqs": 16}, "num_threads": 2},
            "host": "0.0.0.0",
            "metrics": {"compat": "vllm"},
        }
    )

    told = effective(config, served_model(config))

    assert told["served_model_name"] == ["mine", "yours"]
    assert (told["prefill"]["scheduler"]["max_num_seqs"], told["decode"]["scheduler"]["max_num_seqs"]) == (64, 16)
    assert told["prefill"]["scheduler"]["enable_cache_events"] is True, "the router mirrors the prefill caches"
    assert told["decode"]["num_threads"] == 2
    assert (told["router"]["admin_api"], told["router"]["metrics_compat"]) == (False, "vllm")
    assert told["port"] == 8000
    assert told["kv_transfer"]["connector"] == "nixl"


def test_no_key_and_no_hash_is_told() -> None:
    hashes = [hash_key(new_key()) for _ in range(3)]
    config = BatonConfig.model_validate({"security": {"api_keys": hashes[:2], "admin_keys": hashes[2:]}})

    told = effective(config, served_model(config))

    assert (told["security"]["api_keys"], told["security"]["admin_keys"]) == (["(hidden)"] * 2, ["(hidden)"])
    assert "sha256:" not in json.dumps(told)


def test_versions_are_those_that_are_installed() -> None:
    told = versions()

    assert told.keys() == {"baton", "python", "ray", "torch", "nixl"}
    assert (told["baton"], told["ray"]) == (version("baton-serve"), version("ray"))


async def test_store_that_hangs_or_fails_leaves_the_configuration_out() -> None:
    may_go = threading.Event()

    def fail() -> object:
        raise RayError

    hung = await ServerFacts(may_go.wait, timeout_s=0.01)()
    may_go.set()
    failed = await ServerFacts(fail)()
    whole = await ServerFacts(lambda: {"port": 1})()

    assert [facts["config"] for facts in (hung, failed, whole)] == [None, None, {"port": 1}]
    assert hung["versions"] == versions()
