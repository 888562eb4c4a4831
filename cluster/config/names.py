"""The names of a cluster's parts in Ray Serve, and of processes."""

from __future__ import annotations

APP_NAME = "baton"
ROUTER = "router"
"""The deployment of the routers. The other deployments have the names of their workers' roles (router/roles/)."""

NAMESPACE = "baton"

EFFECTIVE = "effective"
"""The key of Ray's store for the settings that `/server_info` shows."""

FORK_SERVER = "cluster.deploy.fork_server.server"
"""The module that the process runs which is forked for a private Ray's workers."""

RAYLET = "raylet"
