"""One Serve application with simulated workers, in a process of its own with a Ray of its own.

    python -m benchmarks.serve_stage baton|two_hops|one_hop|nothing default|optimized|haproxy|direct PORT

Serve reads its settings when it is imported, so each combination needs its own process. With ``direct`` Baton's router
listens itself. ``nothing`` is three deployments that do nothing. Prints ``ready``, then serves until its standard input
ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.deploy.serve_env import (
    haproxy_environment,
    make_session_folder,
    private_ray_environment,
    serve_environment,
)

STEP_VARIABLE = "BATON_BENCHMARK_STEP_MS"
"""The variable that sets the duration of a step for simulated workers; 1 ms by default."""


def main() -> None:
    """Start, serve, stop."""
    kind, mode, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    folder = make_session_folder()
    variables: dict[str, str] = {}
    if mode != "default":
        variables.update(serve_environment())
    if mode == "haproxy":
        variables.update(haproxy_environment(folder))
    # Pretended workers do one kind of work each.
    config = BatonConfig(port=port, http_proxy="none" if mode == "direct" else "serve", roles="fixed")
    serve_until_told(lambda: _application(kind, config), config, folder=folder, variables=variables)


def serve_until_told(
    make_application: Callable[[], Any], config: BatonConfig, *, folder: Path, variables: Mapping[str, str]
) -> None:
    """Start a Ray with these environment variables and serve an application there until standard input ends.

    Prints ``ready`` as soon as it serves. Neither Ray nor Serve may have been imported before.
    """
    os.environ.update({**private_ray_environment(folder), **variables})
    import logging

    from ray import serve

    from cluster.deploy.ray_home import PrivateRay

    home = PrivateRay(folder=folder, num_cpus=8, object_store_bytes=config.object_store_bytes, resources={})
    try:
        home.start()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="Disabled" if config.routers_listen else "HeadOnly",
            http_options={"host": config.host, "port": config.port},
        )
        serve.run(make_application(), name=APP_NAME, route_prefix="/")
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        home.stop()
        home.remove_logs()


def cluster_of(config: BatonConfig, worker: type[Any]) -> Any:
    """Baton on this machine with simulated workers."""
    from cluster.config.served_model import served_model
    from cluster.plan.placement import place, this_machine
    from cluster.serve.graph import build_graph

    return build_graph(config, served_model(config), place(config, [this_machine(config)]), worker=worker)


def _application(kind: str, config: BatonConfig) -> Any:
    from ray import serve

    from benchmarks.plain_app import Nothing, PlainGenerator, PlainOneHop, PlainTwoHops
    from benchmarks.token_workers import TokenWorker

    if kind == "baton":
        return cluster_of(config, TokenWorker)
    options = {"max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0.1}}
    if kind == "nothing":
        parts = [serve.deployment(name=f"nothing_{number}", **options)(Nothing) for number in range(3)]
        return parts[0].bind(parts[1].bind(), parts[2].bind())
    if kind == "one_hop":
        return serve.deployment(**options)(PlainOneHop).bind()
    generator = serve.deployment(**options)(PlainGenerator).bind()
    return serve.deployment(**options)(PlainTwoHops).bind(generator)


if __name__ == "__main__":
    main()
