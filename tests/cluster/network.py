"""Network namespaces on a bridge that has a namespace of its own: the wires between the test hosts and this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

import psutil

NETWORK = IPv4Network("10.213.77.0/24")
OPERATOR = IPv4Address("10.213.77.1")
"""Where `ray up` is called, and where clients are: this machine's end of its wire."""

PREFIX = "bt"


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
    """One host's wire: ``outside`` is its end at the bridge. What the host receives, ``outside`` has sent."""

    namespace: str
    switch: str
    outside: str
    address: IPv4Address

    def cut(self) -> None:
        """Nothing passes any more, as if the cable were out."""
        run("ip", "-n", self.switch, "link", "set", self.outside, "down")

    def mend(self) -> None:
        """Let everything pass again."""
        run("ip", "-n", self.switch, "link", "set", self.outside, "up")

    def received_bytes(self) -> int:
        """Bytes that the host received since its link was made."""
        (device,) = json.loads(run("ip", "-n", self.switch, "-json", "-stats", "link", "show", "dev", self.outside))
        return int(device["stats64"]["tx"]["bytes"])


@dataclass(slots=True, kw_only=True)
class Network:
    """The bridge and its links. Their names contain our process id, so that those of others are not touched.

    The bridge has a namespace of its own because this machine's packet filter may be closed to what passes through it,
    as it is where Docker runs.
    """

    name: str = field(default_factory=lambda: f"{PREFIX}{os.getpid()}")
    links: list[Link] = field(default_factory=list)

    @property
    def switch(self) -> str:
        """The bridge's namespace."""
        return f"{self.name}s"

    def open(self) -> None:
        """Make the bridge and the wire to this machine."""
        remove_leftovers()
        in_use = [line.split()[0] for line in run("ip", "-4", "route", "show").splitlines()]
        if str(NETWORK) in in_use:
            raise RuntimeError(f"{NETWORK} is in use on this machine: another run of these tests has not ended")
        inside = ("ip", "-n", self.switch, "link")
        run("ip", "netns", "add", self.switch)
        run(*inside, "add", "bridge", "type", "bridge")
        run(*inside, "set", "bridge", "up")
        run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "operator", "netns", self.switch)
        run(*inside, "set", "operator", "master", "bridge", "up")
        run("ip", "address", "add", f"{OPERATOR}/{NETWORK.prefixlen}", "dev", self.name)
        run("ip", "link", "set", self.name, "up")

    def add_link(self) -> Link:
        """A new namespace with one wire to the bridge."""
        number = len(self.links)
        link = Link(
            namespace=f"{self.name}h{number}",
            switch=self.switch,
            outside=f"host{number}",
            address=NETWORK[10 + number],
        )
        self.links.append(link)
        run("ip", "netns", "add", link.namespace)
        inside, bridge = ("ip", "-n", link.namespace), ("ip", "-n", self.switch)
        run(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", link.outside, "netns", self.switch)
        run(*bridge, "link", "set", link.outside, "master", "bridge", "up")
        run(*inside, "address", "add", f"{link.address}/{NETWORK.prefixlen}", "dev", "eth0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")
        return link

    def close(self) -> None:
        """Remove everything that was made, even after a failure in between."""
        for link in self.links:
            try_run("ip", "netns", "delete", link.namespace)
        remove_bridge(self.name)


def remove_leftovers() -> None:
    """Remove the networks of runs that were killed: those whose process is gone."""
    for line in run("ip", "netns", "list").splitlines():
        match = re.fullmatch(rf"({PREFIX}(\d+))(s|h\d+)", line.split()[0])
        if match is None or psutil.pid_exists(int(match.group(2))):
            continue
        if match.group(3) == "s":
            remove_bridge(match.group(1))
        else:
            try_run("ip", "netns", "delete", match.group())


def remove_bridge(name: str) -> None:
    """Remove a network's bridge and its wire to this machine, which would outlive its namespace by a moment."""
    try_run("ip", "link", "delete", name)
    try_run("ip", "netns", "delete", f"{name}s")


def try_run(*command: str) -> None:
    """Run a command of this machine that may fail because there is nothing to do."""
    with contextlib.suppress(RuntimeError):
        run(*command)
