"""What the parts of a cluster are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "baton"
PREFILL = "prefill"
DECODE = "decode"
ROUTER = "router"
NAMESPACE = "baton"
