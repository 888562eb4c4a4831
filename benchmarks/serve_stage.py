"""One Serve application with pretended workers, in a process of its own with a Ray of its own.

    python -m benchmarks.serve_stage baton|two_hops|one_hop default|optimized|haproxy|direct PORT

Serve reads its settings when it is imported, so each combination needs its own process. With ``direct`` Baton's router
listens itself. Prints ``ready``, then serves until its standard input ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster.config.config import BatonConfig
from cluster.deploy.serve_env import (
    haproxy_environment,
    make_session_folder,
    private_ray_environment,
    serve_environment,
)

STEP_VARIABLE = "BATON_BENCHMARK_STEP_MS"
"""Tells pretended workers how long a step takes; without it, 1 ms."""


def main() -> None:
    """Start, serve, stop."""
    kind, mode, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    folder = make_session_folder()
    variables = private_ray_environment(folder)
    if mode != "default":
        variables.update(serve_environment())
    if mode == "haproxy":
        variables.update(haproxy_environment(folder))
    os.environ.update(variables)
    _serve(kind, mode, port, folder)


def _serve(kind: str, mode: str, port: int, folder: Path) -> None:
    import logging

    from ray import serve

    from cluster.deploy.ray_home import PrivateRay

    is_direct = mode == "direct"
    # Pretended workers do one kind of work each.
    config = BatonConfig(port=port, http_proxy="none" if is_direct else "serve", roles="fixed")
    home = PrivateRay(folder=folder, num_cpus=8, object_store_bytes=config.object_store_bytes, resources={})
    try:
        home.start()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="Disabled" if is_direct else "HeadOnly", http_options={"host": "127.0.0.1", "port": port}
        )
        serve.run(_application(kind, config), name="baton", route_prefix="/")
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        home.stop()
        home.remove_logs()


def _application(kind: str, config: BatonConfig) -> object:
    from ray import serve

    from benchmarks.plain_app import PlainGenerator, PlainOneHop, PlainTwoHops
    from benchmarks.token_workers import TokenWorker
    from cluster.config.served_model import served_model
    from cluster.plan.placement import place, this_machine
    from cluster.serve.graph import build_graph

    if kind == "baton":
        return build_graph(config, served_model(config), place(config, [this_machine(config)]), worker=TokenWorker)
    options = {"max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0.1}}
    if kind == "one_hop":
        return serve.deployment(**options)(PlainOneHop).bind()
    generator = serve.deployment(**options)(PlainGenerator).bind()
    return serve.deployment(**options)(PlainTwoHops).bind(generator)


if __name__ == "__main__":
    main()
