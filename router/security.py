"""Who may call the API, and how large what they send may be: settings, built once and checked when built."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from router.host_rule import ANY, HostRule, is_host_name

HASH_PREFIX = "sha256:"
KEY_PREFIX = "baton-"
KEY_BYTES = 32
MIN_KEY_CHARACTERS = 32

_HASH = re.compile(rf"{HASH_PREFIX}[0-9a-f]{{64}}")

Rank: TypeAlias = Literal["none", "user", "admin"]
"""What a key is good for; an admin key opens what a user's key opens."""


class SecurityError(ValueError):
    """Keys, or a file of keys, that cannot be used: one line that says why."""


def new_key() -> str:
    """A key with 256 random bits, in characters that need no quoting anywhere."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """What the configuration holds of a key.

    One round of SHA-256, and no slow password hash: nobody guesses 256 random bits, however fast each guess is, and a
    hash that takes 50 ms would let anyone without a key occupy the router with wrong ones.
    """
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """Without keys everybody may use the API, and read /status and /metrics.

    Keys are given as hashes (`baton keys new`), here or in files. With ``api_keys``, all but the health checks asks for
    one of them; ``admin_keys`` also open /status, /metrics, /server_info and orders to workers, which no key of
    ``api_keys`` does. Orders always ask for an admin key. ``own_admin_key`` is the hash of the key that a cluster
    without ``admin_keys`` made for itself, ``is_loopback`` says that the API listens on the loopback address only; both
    are no settings of a user's.

    ``max_num_headers`` and ``max_header_bytes``, the URL's included, bound what comes before a body, and
    ``header_timeout_s`` how long that may take: from a connection's beginning, or its next request's first byte.
    Of ``max_connections`` that are open, or of fewer where the process may open fewer files, the one that waits longest
    for a request is closed for each that comes.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    open_metrics: bool = False
    max_num_headers: int = 100
    max_header_bytes: int = 32 * 1024
    header_timeout_s: float = 30.0
    max_connections: int = 10_000
    cors_allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    own_admin_key: str | None = None
    is_loopback: bool = False

    def __post_init__(self) -> None:
        for name in ("api_keys", "admin_keys"):
            check_hashes(getattr(self, name), where=f"security.{name}")
        for name in ("max_num_headers", "max_header_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise SecurityError(f"security.{name} must be at least 1, got {getattr(self, name)}")
        if self.header_timeout_s <= 0:
            raise SecurityError(f"security.header_timeout_s must be more than 0 seconds, got {self.header_timeout_s}")
        for origin in self.cors_allow_origins:
            _check_origin(origin)
        for name in self.allowed_hosts:
            if not is_host_name(name):
                raise SecurityError(
                    f"security.allowed_hosts: {name!r} is no name such as chat.example.org or 10.0.0.5, without scheme "
                    f"and port, nor {ANY!r}"
                )

    @property
    def has_keys(self) -> bool:
        """True when keys are configured."""
        return bool(self.api_keys or self.has_configured_admin_keys or self.api_key_file)

    @property
    def has_configured_admin_keys(self) -> bool:
        """True when some of them are admin keys."""
        return bool(self.admin_keys or self.admin_key_file)

    @property
    def has_admin_keys(self) -> bool:
        """True when there is a key for /admin, configured or the cluster's own."""
        return self.has_configured_admin_keys or self.own_admin_key is not None

    @property
    def host_rule(self) -> HostRule | None:
        """How Host and Origin are compared; None where keys protect, or where its own names cannot be known."""
        is_open_here = self.is_loopback and not (self.api_keys or self.api_key_file)
        if not is_open_here and not self.allowed_hosts:
            return None
        return HostRule(allowed_hosts=self.allowed_hosts, allowed_origins=self.cors_allow_origins)

    def loaded(self) -> SecuritySettings:
        """The same settings with the keys of the files in them.

        Raises:
            SecurityError: A file cannot be read, or holds no hash of a key.
        """
        return dataclasses.replace(
            self,
            api_keys=self.api_keys + read_key_file(self.api_key_file),
            admin_keys=self.admin_keys + read_key_file(self.admin_key_file),
            api_key_file=None,
            admin_key_file=None,
        )


def check_hashes(hashes: Iterable[str], *, where: str) -> None:
    """Refuse what is no hash of a key, without repeating it: it may be the key itself.

    Raises:
        SecurityError: One is not.
    """
    for number, text in enumerate(hashes, start=1):
        if not _HASH.fullmatch(text):
            raise SecurityError(
                f"{where}: entry {number} is not '{HASH_PREFIX}' and 64 hexadecimal digits; "
                "`baton keys new` makes a key and its hash"
            )


def read_key_file(path: Path | None) -> tuple[str, ...]:
    """The hashes in a file, one a line; ``#`` begins a comment.

    Raises:
        SecurityError: It cannot be read, holds none, or a line is something else.
    """
    if path is None:
        return ()
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except RuntimeError as error:
        raise SecurityError(f"cannot read the key file {path}: there is no user {path.parts[0][1:]!r}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SecurityError(f"cannot read the key file {path}: {reason}") from error
    hashes = tuple(line for raw in text.splitlines() if (line := raw.partition("#")[0].strip()))
    check_hashes(hashes, where=str(path))
    if not hashes:
        raise SecurityError(f"the key file {path} holds no hash of a key, so nobody could use the API")
    return hashes


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    is_origin = parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"
    if origin != "*" and not is_origin:
        raise SecurityError(
            f"security.cors_allow_origins: {origin!r} is no origin such as https://chat.example.org, nor '*'"
        )


class KeyRing:
    """Knows the rank of a key. Every hash is compared, each in constant time, whatever the key is."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._user = tuple(text.encode() for text in settings.api_keys)
        own = () if settings.own_admin_key is None else (settings.own_admin_key,)
        self._admin = tuple(text.encode() for text in (*settings.admin_keys, *own))

    def rank_of(self, key: str) -> Rank:
        """What a key opens."""
        hashed = hash_key(key).encode()
        is_user = _is_among(hashed, self._user)
        is_admin = _is_among(hashed, self._admin)
        return "admin" if is_admin else "user" if is_user else "none"


def _is_among(hashed: bytes, known: Iterable[bytes]) -> bool:
    is_found = False
    for item in known:
        is_found |= hmac.compare_digest(hashed, item)
    return is_found
