"""Who may call the API, and how much they may send: settings, built once and checked when built."""

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
"""What a key permits; an admin key also permits everything that a user's key does."""


class SecurityError(ValueError):
    """Keys, or a file of keys, cannot be used; the message is one line that says why."""


def new_key() -> str:
    """A new key with 256 random bits, in characters that never need quoting."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """The hash of a key, which the configuration stores instead of the key.

    It is one round of SHA-256, not a slow password hash. Nobody guesses 256 random bits, however fast a guess is, and a
    hash that takes 50 ms would let anyone without a key keep the router busy with wrong keys.
    """
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """Without keys anybody may use the API, and read /status and /metrics.

    Keys are given as hashes (`baton keys new`), here or in files. With ``api_keys``, everything but the health checks
    needs one of them. ``admin_keys`` also permit /status, /metrics, /server_info and orders to workers, which
    ``api_keys`` do not. Orders always need an admin key. ``own_admin_key`` is the hash of the key that a cluster
    without ``admin_keys`` made for itself; ``is_loopback`` says that the API listens on the loopback address only.
    Users set neither of these two.

    ``max_num_headers`` and ``max_header_bytes`` bound a request's head, including the URL; ``header_timeout_s`` bounds
    its time, from a connection's start or from its next request's first byte. At ``max_connections``, or fewer if the
    process may open fewer files, each new connection closes the one that has waited longest for a request.
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
        """True when admin keys are configured."""
        return bool(self.admin_keys or self.admin_key_file)

    @property
    def has_admin_keys(self) -> bool:
        """True when there is an admin key, configured or the cluster's own."""
        return self.has_configured_admin_keys or self.own_admin_key is not None

    @property
    def host_rule(self) -> HostRule | None:
        """The check of Host and Origin; None if keys protect the API, or if its own names cannot be known."""
        is_open_here = self.is_loopback and not (self.api_keys or self.api_key_file)
        if not is_open_here and not self.allowed_hosts:
            return None
        return HostRule(allowed_hosts=self.allowed_hosts, allowed_origins=self.cors_allow_origins)

    def loaded(self) -> SecuritySettings:
        """The same settings with the keys from the files added.

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
    """Refuse texts that are no hash of a key, without quoting them: such a text may be the key itself.

    Raises:
        SecurityError: A text is no hash.
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
        raise SecurityError(
            f"the key file {path} has no hash of a key, so that nobody could use the API: add one (`baton keys new`)"
        )
    return hashes


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    is_origin = parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"
    if origin != "*" and not is_origin:
        raise SecurityError(
            f"security.cors_allow_origins: {origin!r} is no origin such as https://chat.example.org, nor '*'"
        )


class KeyRing:
    """Looks up the rank of a key. It compares every hash, each in constant time, so that timing reveals nothing."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._user = tuple(text.encode() for text in settings.api_keys)
        own = () if settings.own_admin_key is None else (settings.own_admin_key,)
        self._admin = tuple(text.encode() for text in (*settings.admin_keys, *own))

    def rank_of(self, key: str) -> Rank:
        """What a key permits."""
        hashed = hash_key(key).encode()
        is_user = _is_among(hashed, self._user)
        is_admin = _is_among(hashed, self._admin)
        return "admin" if is_admin else "user" if is_user else "none"


def _is_among(hashed: bytes, known: Iterable[bytes]) -> bool:
    is_found = False
    for item in known:
        is_found |= hmac.compare_digest(hashed, item)
    return is_found
