"""The URL of a cluster's API."""

from __future__ import annotations

from cluster.config.config import BatonConfig


def url_of(host: str, port: int) -> str:
    """The URL of an API; IPv6 addresses are put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def base_url(config: BatonConfig) -> str:
    """The URL at which a client on this machine reaches the API."""
    return url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host), config.port)
