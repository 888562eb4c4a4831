"""The first check of each request: limits on headers, allowed host names, and API keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.errors import error_response
from router.errors import AdminKeyError, HeadersTooLargeError, InvalidApiKeyError, RouterError
from router.security import KeyRing, SecuritySettings, hash_key

_OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/v1/health", "/ping", "/ready"})
"""Paths for load balancers."""

_ORDER_PATHS = ("/admin", "/reset_prefix_cache", "/server_info")
_READ_PATHS = ("/status", "/metrics", "/admin/events")
_ADMIN_PATHS = (*_READ_PATHS, *_ORDER_PATHS)
"""These paths and everything below them. If the only key is the cluster's own, only orders need it."""

_PAGE_FILES = "/live/"
"""The files of the page at /, which reveal nothing about the cluster."""

_OWNER = "baton_owner"
_IS_ADMIN = "baton_is_admin"

Access: TypeAlias = Literal["open", "user", "admin"]


class GuardMiddleware:
    """Refuses requests before any other code sees them. Unknown paths need a key."""

    def __init__(self, app: ASGIApp, *, settings: SecuritySettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = KeyRing(settings)
        self._host_rule = settings.host_rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RouterError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        settings = self._settings
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        num_bytes += len(scope["path"]) + len(scope.get("query_string", b""))
        if len(headers) > settings.max_num_headers or num_bytes > settings.max_header_bytes:
            raise HeadersTooLargeError(
                max_num_headers=settings.max_num_headers, max_header_bytes=settings.max_header_bytes
            )
        if self._host_rule is not None:
            self._host_rule.check(headers)
        needed = self.access_to(scope["path"])
        if needed == "open":
            return
        key, is_own = _key_of(headers), settings.own_admin_key is not None
        rank = "none" if key is None else self._keys.rank_of(key)
        if rank == "none":
            admin_path = scope["path"] if needed == "admin" else ""
            raise InvalidApiKeyError(is_missing=key is None, admin_path=admin_path, is_own=is_own)
        if needed == "admin" and rank != "admin":
            raise AdminKeyError(path=scope["path"], has_any=settings.has_admin_keys, is_own=is_own)
        assert key is not None
        scope[_OWNER] = hash_key(key)
        scope[_IS_ADMIN] = rank == "admin"

    def access_to(self, path: str) -> Access:
        """Which keys open a path."""
        settings = self._settings
        if path in _OPEN_PATHS or (settings.open_metrics and path == "/metrics"):
            return "open"
        if path.startswith(_PAGE_FILES):
            return "open"
        if path in _READ_PATHS and not settings.has_keys:
            return "open"
        closed = _ADMIN_PATHS if settings.has_keys else _ORDER_PATHS if settings.has_admin_keys else ()
        if any(path == admin or path.startswith(admin + "/") for admin in closed):
            return "admin"
        return "user" if settings.api_keys else "open"


def owner_of(scope: Scope) -> str:
    """The owner of a request: the hash of its key, or empty if no key was needed."""
    owner: str = scope.get(_OWNER, "")
    return owner


def is_admin(scope: Scope) -> bool:
    """True if a key was needed and the request has an admin key."""
    return bool(scope.get(_IS_ADMIN))


def _key_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key of a request, if it has exactly one: in Authorization, or without that in X-Api-Key, as clients of
    /v1/messages send it."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        keys = [value.decode("latin-1").strip() for name, value in headers if name == b"x-api-key"]
        return keys[0] or None if len(keys) == 1 else None
    if len(values) != 1:
        return None
    scheme, _, key = values[0].decode("latin-1").partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and key else None
