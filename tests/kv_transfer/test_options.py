"""Settings that contradict each other are refused, with the value and the remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.errors import KVTransferError
from kv_transfer.options import ConnectorOptions
from kv_transfer.registry import TIERS, Tier

ROOT = Path(__file__).parents[2]
TIER = {"connector": "chain", "chain": ("host", "nixl"), "host_bytes": 1024}
DISK = {"connector": "chain", "chain": ("disk", "nixl"), "disk_bytes": 1024, "disk_path": "/cache"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"connector": "carrier-pigeon"}, ("carrier-pigeon", "connectors: nixl, chain")),
        ({**TIER, "connector": "nixl"}, ("['host', 'nixl']", "connector: chain")),
        ({**TIER, "chain": ()}, ("[]", "exactly one", "nixl")),
        ({**TIER, "chain": ("host",)}, ("['host']", "exactly one", "nixl")),
        ({**TIER, "chain": ("host", "nixl", "inproc")}, ("exactly one",)),
        ({**TIER, "chain": ("host", "nixl", "host")}, ("twice",)),
        ({**TIER, "chain": ("tape", "nixl")}, ("'tape'", f"sources: nixl, {', '.join(TIERS)}")),
        ({**DISK, "disk_bytes": 0, "disk_path": None}, ("disk_bytes is 0",)),
        ({**DISK, "disk_path": None}, ("disk_bytes is 1024", "disk_path is None")),
        ({**DISK, "disk_path": "cache"}, ("absolute", "'cache'")),
        ({"disk_path": "/cache"}, ("disk_bytes is 0", "/cache")),
        ({**DISK, "chain": ("nixl",)}, ("1024", "chain: [disk, nixl]")),
        ({**TIER, "host_bytes": 0}, ("host_bytes is 0",)),
        ({**TIER, "host_bytes": -1}, ("host_bytes", "-1")),
        ({"host_bytes": 1024}, ("1024", "chain: [host, nixl]")),
        ({**TIER, "chain": ("nixl",)}, ("1024", "no host tier")),
        ({"lease_ttl_s": 0.0}, ("lease_ttl_s", "0", "seconds")),
        ({"lease_ttl_s": float("nan")}, ("lease_ttl_s", "nan")),
        ({"lease_ttl_s": float("inf")}, ("lease_ttl_s", "inf")),
        ({"handshake_timeout_s": -1.0}, ("handshake_timeout_s", "-1")),
        ({"load_timeout_s": 0.0}, ("load_timeout_s", "0")),
        ({"answer_timeout_s": -1.0}, ("answer_timeout_s", "-1")),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(KVTransferError) as refused:
        ConnectorOptions(**changes)

    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("chain", [("host", "nixl"), ("nixl", "host")])
def test_any_order_of_sources_is_good(chain: tuple[str, ...]) -> None:
    options = ConnectorOptions(connector="chain", chain=chain, host_bytes=1024)

    assert (options.sources, options.peer_source) == (chain, "nixl")


def test_tiers_are_known_by_name_and_say_what_they_take() -> None:
    both = ConnectorOptions(
        connector="chain", chain=("host", "disk", "nixl"), host_bytes=1 << 30, disk_bytes=1 << 40, disk_path="/cache"
    )

    assert [(tier.name, tier.num_bytes(both)) for tier in both.tiers] == [("host", 1 << 30), ("disk", 1 << 40)]
    assert both.main_memory_bytes() == (1 << 30) + (64 << 20), "the disk tier has a buffer in main memory"
    assert ConnectorOptions().main_memory_bytes() == 0


@pytest.mark.parametrize("tier", TIERS.values(), ids=lambda tier: tier.name)
def test_what_a_registered_tier_needs_is_there(tier: Tier) -> None:
    """Its settings are part of all settings, each with a description for the reference page, and the page of tiers
    explains it."""
    assert issubclass(ConnectorOptions, tier.options)
    assert tier.size_key in ConnectorOptions.__dataclass_fields__
    assert all(item.metadata["description"] for item in fields(tier.options))
    assert f"{tier.size_key}:" in (ROOT / "docs" / "tiers.md").read_text()
