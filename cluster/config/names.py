"""What the parts of a cluster are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "baton"
PREFILL = "prefill"
DECODE = "decode"
ROUTER = "router"
NAMESPACE = "baton"

EFFECTIVE = "effective"
"""Under this key Ray keeps the settings that `/server_info` tells."""
