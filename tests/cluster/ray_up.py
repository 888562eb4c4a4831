"""`ray up` with the file that users start from, for the test hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster.hosts import Host
from tests.cluster.network import run

ROOT = Path(__file__).parents[2]
RAY = Path(sys.prefix) / "bin" / "ray"
EXAMPLE = ROOT / "deploy" / "own-machines.yaml"
CHECKOUT = "baton"
LISTS = ("'10.0.0.11 10.0.0.12'", "'10.0.0.13 10.0.0.14'")
"""The machines for prefill and those for decode, as the file has them."""
UP_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The operator's machine: a home with a key, Ray's token, a checkout without an environment (all of it is copied at
    every `ray up`), and a copy of the file with the addresses filled in.
    """

    folder: Path
    config: Path

    @classmethod
    def prepare(
        cls, folder: Path, *, key: Path, head: Host, prefill: Sequence[Host], decode: Sequence[Host], models: Path
    ) -> Launcher:
        """Edit what the file says must be edited, and send a model along."""
        folder.mkdir()
        left_out = ("--exclude=.git", "--exclude=.venv", "--filter=:- .gitignore")
        run("rsync", "--archive", *left_out, f"{ROOT}/", str(folder / CHECKOUT))
        content = yaml.safe_load(EXAMPLE.read_text())
        content["provider"].update(head_ip=head.address, worker_ips=[host.address for host in (*prefill, *decode)])
        content["file_mounts"]["~/model"] = str(models)
        content["auth"].update(ssh_user="root", ssh_private_key=str(key))
        start = content["worker_start_ray_commands"]
        for listed, pool in zip(LISTS, (prefill, decode), strict=True):
            assert listed in start[1], "the file has other lists of roles"
            start[1] = start[1].replace(listed, f"'{' '.join(host.address for host in pool)}'")
        # One after another: Ray dies where its helpers take more than 15 seconds to start, and all have the same cores.
        lock = folder.parent / "start.lock"
        start[1] = start[1].replace("baton_start", f"exec 9>{lock}; flock 9; baton_start") + " 9>&-"
        # Before everything else that wants the cores, for the same reason; Ray's workers are 15 nicer than Ray.
        for commands in (content["head_start_ray_commands"], start):
            commands[-1] = commands[-1].replace("ray start --", "nice -n -15 ray start --")
        # Ten processes that nobody looks at here, and that take as long to start as all others together.
        content["head_start_ray_commands"][-1] += " --include-dashboard=false"
        config = folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(content))
        launcher = cls(folder=folder, config=config)
        launcher.ray("get-auth-token", "--generate")
        (folder / ".ray" / "auth_token").chmod(0o600)
        return launcher

    def up(self) -> str:
        """Start the cluster, or bring what runs in line with the file."""
        return self.ray("up", "--yes", "--no-config-cache", str(self.config), timeout_s=UP_TIMEOUT_S)

    def stop(self) -> str:
        """Stop Ray on every machine."""
        return self.ray("exec", str(self.config), ". ~/baton/deploy/node.sh; baton_stop")

    def down(self) -> str:
        """Forget the machines."""
        return self.ray("down", "--yes", str(self.config))

    def ray(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Run a command of Ray as the operator would; what it printed. It must succeed."""
        log = self.folder / "log"
        with log.open("wb") as output:  # a file: what it starts would keep a pipe open
            process = subprocess.Popen(
                [str(RAY), *arguments],
                cwd=self.folder / CHECKOUT,
                env={**os.environ, "HOME": str(self.folder), "RAY_TMPDIR": str(self.folder), "TERM": "dumb"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        said = log.read_text(errors="replace")
        assert process.returncode == 0, f"ray {' '.join(arguments)}: {process.returncode}\n{said}"
        return said
