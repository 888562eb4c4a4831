"""A cluster of paced workers, in a process of its own with a Ray of its own.

    python -m benchmarks.scaling_parts.stage CONFIG.yaml

The environment variable ``MACHINE_VARIABLE`` names the machine whose steps they make. Prints ``ready``, then serves
until its standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.serve_stage import cluster_of, serve_until_told
from cluster.config.config_file import load_config
from cluster.deploy.serve_env import make_session_folder, serve_environment


def main() -> None:
    """Start, serve, stop."""
    config = load_config(Path(sys.argv[1]), {})

    def application() -> object:
        from benchmarks.scaling_parts.paced_worker import PacedWorker

        return cluster_of(config, PacedWorker)

    serve_until_told(application, config, folder=make_session_folder(), variables=serve_environment())


if __name__ == "__main__":
    main()
