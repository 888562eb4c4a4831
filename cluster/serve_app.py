"""What a Serve configuration file names as ``import_path``: for `serve deploy`, and for RayService on Kubernetes.

`baton deploy` does more: it refuses what cannot work before anything changes, and takes a failed update back.
"""

from __future__ import annotations

from ray import serve

from cluster.app import build_graph
from cluster.config import BatonConfig
from cluster.inventory import nodes_of_ray
from cluster.plan import make_plan
from cluster.ray_home import list_nodes
from cluster.served_model import served_model
from engine.errors import ConfigError


def build(args: BatonConfig) -> serve.Application:
    """The application of a configuration; ``args`` are the keys of a baton.yaml.

    ``host`` and ``port`` are Serve's there: ``http_options`` of the same file.

    Raises:
        ConfigError, CheckpointError: It does not fit the machines that Ray has now; Serve shows the message.
    """
    config = args.model_copy(update={"address": "auto"})
    model = served_model(config)
    plan = make_plan(config, model, nodes_of_ray(list_nodes()))
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    return build_graph(config, model, plan.placement)
