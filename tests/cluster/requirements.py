"""What test hosts need of this machine: installed where that can be done, named where it cannot.

``python -m tests.cluster.requirements``: exit code 0 where they can be made, else 3, with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import DIES_WITH_US
from tests.cluster.network import PREFIX, run

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "rsync": "rsync", "make": "make"}
PACKAGES |= {"unshare": "util-linux", "setpriv": "util-linux", "redis-server": "redis-server"}
"""Programs, and the Debian packages that bring them."""

INSTALL_TIMEOUT_S = 300.0
CANNOT = 3
"""Exit code: neither 1 nor 2, with which Python itself fails."""


def why_not() -> str | None:
    """Why test hosts cannot be made on this machine, after installing what can be installed; None if they can."""
    if sys.platform != "linux":
        return f"they are made of Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "namespaces and bridges need root: run `sudo make test-cluster`, or leave it to a machine where you may"
    missing = missing_programs()
    if missing and (failure := _install([PACKAGES[program] for program in missing])):
        return f"{', '.join(missing)} must be installed ({failure})"
    return _try_namespaces()


def missing_programs() -> list[str]:
    """What is not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [program for program in PACKAGES if shutil.which(program, path=path) is None]


def _install(packages: list[str]) -> str | None:
    """Install Debian packages without starting their services; why that failed, if it did."""
    if shutil.which("apt-get") is None:
        return f"with something else than apt-get: {' '.join(packages)}"
    policy = Path("/usr/sbin/policy-rc.d")
    is_ours = not policy.exists()
    if is_ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
            result = subprocess.run(
                ["apt-get", "-o", "Acquire::http::Timeout=20", *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                check=False,
            )
        return None if result.returncode == 0 else f"apt-get failed: {result.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        return f"apt-get did not end within {INSTALL_TIMEOUT_S:.0f} s"
    finally:
        if is_ours:
            policy.unlink()


def _try_namespaces() -> str | None:
    """Do once what every test host does."""
    name = f"{PREFIX}{os.getpid()}h0"
    script = (
        "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge && hostname probe && "
        "mount --make-rprivate / && mount -t tmpfs none /tmp && mount --bind /etc/passwd /etc/hosts"
    )
    isolate = ["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--mount-proc", "--kill-child=SIGKILL"]
    try:
        run("ip", "netns", "add", name)
        try:
            run(*DIES_WITH_US, "ip", "netns", "exec", name, *isolate, "bash", "-c", script)
        finally:
            run("ip", "netns", "delete", name)
    except RuntimeError as error:
        return f"network namespaces, veth, bridges and mounts do not work here, as in many containers ({error})"
    return None


def main() -> int:
    """Say whether test hosts can be made here."""
    reason = why_not()
    print("test hosts can be made here" if reason is None else f"test hosts cannot be made here: {reason}")
    return 0 if reason is None else CANNOT


if __name__ == "__main__":
    sys.exit(main())
