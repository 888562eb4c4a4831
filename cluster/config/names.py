"""What the parts of a cluster are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "baton"
ROUTER = "router"
"""The deployment of the routers; the others are called as the roles of their workers (router/roles.py)."""

NAMESPACE = "baton"

EFFECTIVE = "effective"
"""Under this key Ray keeps the settings that `/server_info` tells."""
