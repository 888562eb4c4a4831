"""Settings that contradict each other are refused, with the value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.errors import KVTransferError
from kv_transfer.options import ConnectorOptions

TIER = {"connector": "chain", "chain": ("host", "nixl"), "host_bytes": 1024}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"connector": "carrier-pigeon"}, ("carrier-pigeon", "nixl")),
        ({**TIER, "connector": "nixl"}, ("['host', 'nixl']", "connector: chain")),
        ({**TIER, "chain": ()}, ("[]", "exactly one", "nixl")),
        ({**TIER, "chain": ("host",)}, ("['host']", "exactly one", "nixl")),
        ({**TIER, "chain": ("host", "nixl", "inproc")}, ("exactly one",)),
        ({**TIER, "chain": ("host", "nixl", "host")}, ("twice",)),
        ({**TIER, "chain": ("disk", "nixl")}, ("'disk'", "host")),
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
