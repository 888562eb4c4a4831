"""Which host names an API without keys answers to, and which web pages may call it.

This prevents DNS rebinding: an attacker lets the name of its web page resolve to 127.0.0.1, so that the visitor's
browser takes any local server for the same site, and lets the page call it. The Host header gives the attack away,
because it has the attacker's name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from router.errors import HostNotAllowedError, OriginNotAllowedError

ANY = "*"
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_WITH_PORT = re.compile(r"(?P<name>\[[^\]]*\]|[^:]*)(:[0-9]*)?")


def is_loopback_name(name: str) -> bool:
    """True for names of this machine itself: localhost, 127.0.0.0/8, and ::1."""
    if name.lower() in LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_host_name(name: str) -> bool:
    """True for a name or an address without scheme and port, and for ``*``."""
    bare = bare_name(name)
    if name == ANY or _NAME.fullmatch(bare):
        return True
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True


def bare_name(name: str) -> str:
    """Normalize a name for comparison: lower case, without an IPv6 address's brackets and the trailing root dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


class HostRule:
    """Checks the Host and Origin headers of requests."""

    def __init__(self, *, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]) -> None:
        self._hosts = frozenset(bare_name(name) for name in allowed_hosts)
        self._origins = frozenset(allowed_origins)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request that was sent to another name, or by a page of another site.

        A request without a Host header passes: HTTP/1.0 has none, and browsers always send it.

        Raises:
            HostNotAllowedError, OriginNotAllowedError: The header has a name or an origin that is not allowed.
        """
        found = [(name, value.decode("latin-1").strip()) for name, value in headers if name in (b"host", b"origin")]
        hosts = [value for name, value in found if name == b"host" and value]
        for host in hosts:
            if not self._is_known(host):
                raise HostNotAllowedError(host=host)
        for origin in (value for name, value in found if name == b"origin"):
            if not self._may_call(origin, hosts):
                raise OriginNotAllowedError(origin=origin)

    def _is_known(self, host: str) -> bool:
        match = _WITH_PORT.fullmatch(host)
        name = bare_name(match["name"]) if match else ""
        return ANY in self._hosts or name in self._hosts or is_loopback_name(name)

    def _may_call(self, origin: str, hosts: list[str]) -> bool:
        if origin in self._origins or ANY in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            name = bare_name(parts.hostname or "")
        except ValueError:
            return False
        is_same_site = parts.netloc.lower() in [host.lower() for host in hosts]
        return bool(name) and (is_same_site or name in self._hosts)
