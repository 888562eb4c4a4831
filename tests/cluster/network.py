"""A bridge with an address of ours, and network namespaces on it: the wires between the test hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

NETWORK = IPv4Network("10.213.77.0/24")
OPERATOR = IPv4Address("10.213.77.1")
"""Where `ray up` is called, and where clients are: this machine's end of the bridge."""


def run(*command: str) -> str:
    """Run a command of this machine; what it printed.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One host's wire: ``outside`` is the bridge's end. What the host receives, ``outside`` has sent."""

    namespace: str
    outside: str
    address: IPv4Address

    def cut(self) -> None:
        """Nothing passes any more, as if the cable were out."""
        run("ip", "link", "set", self.outside, "down")

    def mend(self) -> None:
        """Let everything pass again."""
        run("ip", "link", "set", self.outside, "up")

    def received_bytes(self) -> int:
        """What came to the host since its link was made."""
        return self._statistic("tx_bytes")

    def sent_bytes(self) -> int:
        """What left the host since its link was made."""
        return self._statistic("rx_bytes")

    def _statistic(self, name: str) -> int:
        with open(f"/sys/class/net/{self.outside}/statistics/{name}", encoding="ascii") as file:
            return int(file.read())


@dataclass(slots=True, kw_only=True)
class Network:
    """The bridge and its links. Names carry our process id, so that nobody else's are touched."""

    name: str = field(default_factory=lambda: f"bt{os.getpid()}")
    links: list[Link] = field(default_factory=list)

    def open(self) -> None:
        """Make the bridge."""
        in_use = [line.split()[0] for line in run("ip", "-4", "route", "show").splitlines()]
        if str(NETWORK) in in_use:
            raise RuntimeError(f"{NETWORK} is in use on this machine: another run of these tests has not ended")
        run("ip", "link", "add", self.name, "type", "bridge")
        run("ip", "address", "add", f"{OPERATOR}/{NETWORK.prefixlen}", "dev", self.name)
        run("ip", "link", "set", self.name, "up")

    def add_link(self) -> Link:
        """A new namespace with one wire to the bridge."""
        number = len(self.links)
        link = Link(namespace=f"{self.name}h{number}", outside=f"{self.name}v{number}", address=NETWORK[10 + number])
        self.links.append(link)
        run("ip", "netns", "add", link.namespace)
        run("ip", "link", "add", link.outside, "type", "veth", "peer", "name", "eth0", "netns", link.namespace)
        run("ip", "link", "set", link.outside, "master", self.name, "up")
        inside = ("ip", "-n", link.namespace)
        run(*inside, "address", "add", f"{link.address}/{NETWORK.prefixlen}", "dev", "eth0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")
        return link

    def close(self) -> None:
        """Remove everything that was made, even after a failure in between."""
        for link in self.links:
            for command in (("ip", "link", "delete", link.outside), ("ip", "netns", "delete", link.namespace)):
                with contextlib.suppress(RuntimeError):
                    run(*command)
        with contextlib.suppress(RuntimeError):
            run("ip", "link", "delete", self.name)
