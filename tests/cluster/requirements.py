"""What test hosts need of this machine: it is installed if possible, and named otherwise.

``python -m tests.cluster.requirements``: exit code 0 where they can be made, else 3, with the reason.
"""

from __future__ import annotations

import os
import shutil
import sys

from tests.cluster.hosts import DIES_WITH_US
from tests.cluster.network import PREFIX, run
from tests.support.debian_packages import install

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "rsync": "rsync", "make": "make"}
PACKAGES |= {"unshare": "util-linux", "setpriv": "util-linux", "redis-server": "redis-server"}
"""Programs, and the Debian packages that bring them."""

CANNOT = 3
"""Exit code: neither 1 nor 2, with which Python itself fails."""


def why_not() -> str | None:
    """Why test hosts cannot be made on this machine, after installing what can be installed; None if they can."""
    if sys.platform != "linux":
        return f"they are made of Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "namespaces and bridges need root: run `sudo make test-cluster`, or leave it to a machine where you may"
    missing = missing_programs()
    if missing and (failure := install([PACKAGES[program] for program in missing])):
        return f"{', '.join(missing)} must be installed ({failure})"
    return _try_namespaces()


def missing_programs() -> list[str]:
    """The programs that are missing."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [program for program in PACKAGES if shutil.which(program, path=path) is None]


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
