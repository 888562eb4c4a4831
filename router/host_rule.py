"""Which names an API without keys answers to, and which web pages may call it.

A page of an attacker can make its own name point to 127.0.0.1 and so call whatever listens there from its visitor's
browser, which takes both for one site (DNS rebinding). The name that the browser then sends, the attacker's, tells.
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
    """True for what means this machine itself: localhost, 127.0.0.0/8, and ::1."""
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
    """A name as it is compared: in small letters, without the brackets of an IPv6 address and the dot of the root."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


class HostRule:
    """Compares the headers Host and Origin of requests with what is allowed."""

    def __init__(self, *, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]) -> None:
        self._hosts = frozenset(bare_name(name) for name in allowed_hosts)
        self._origins = frozenset(allowed_origins)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse requests that were sent to another name, or by a page of another site.

        A request without the header Host passes: HTTP/1.0 has none, and browsers always send it.

        Raises:
            HostNotAllowedError, OriginNotAllowedError: It was.
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
