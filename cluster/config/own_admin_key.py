"""The admin key that `baton serve` makes for itself where none is configured.

It lies in a file of this user's home, by the address of the API, as long as the cluster runs: `baton drain`, `baton
chaos` and `baton status` of the same user find it there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from cluster.config.api_url import base_url
from cluster.config.config import BatonConfig
from cluster.config.private_files import write_private
from router.security import hash_key, new_key

FOLDER = Path("~/.baton/admin-keys")
MAX_KEY_BYTES = 1000
LOCALHOST = "localhost"
PRIVATE_FOLDER = 0o700


@contextlib.contextmanager
def own_admin_key(config: BatonConfig, tell: Callable[[str], None]) -> Iterator[str | None]:
    """The hash of a new key, whose file is there until the block ends; None where admin keys are configured.

    ``tell`` hears why, where the file cannot be written. Then there is no such key either, and orders are refused.
    """
    if config.security_settings().has_configured_admin_keys:
        yield None
        return
    key = new_key()
    try:
        file = _stored(key, base_url(config))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = error.strerror if isinstance(error, OSError) else error
        tell(
            f"Orders such as `baton drain` will be refused: no admin key can be written to {FOLDER} ({reason}); "
            "configure security.admin_keys, or set HOME to a folder of your own"
        )
        yield None
        return
    try:
        yield hash_key(key)
    finally:
        _remove(file, key)


def with_own_key(url: str, api_key: str) -> tuple[str, str]:
    """The URL and the key for a cluster: that of this user's own cluster there, if none was given and one is there.

    Only for an address, since a name may lead to somebody else's: localhost becomes the address at which the user's
    own cluster listens.
    """
    parsed = httpx.URL(url)
    if api_key or parsed.scheme != "http":
        return url, api_key
    for host in ("127.0.0.1", "::1") if parsed.host == LOCALHOST else (parsed.host,):
        candidate = parsed.copy_with(host=host)
        if key := _read(candidate):
            return str(candidate), key
    return url, ""


def _stored(key: str, url: str) -> Path:
    """The file with the key. Another cluster that ends may take the empty folder away just now: twice, if need be."""
    file = key_file(url)
    try:
        _store(key, file)
    except FileNotFoundError:
        _store(key, file)
    return file


def _store(key: str, file: Path) -> None:
    for folder in (file.parent.parent, file.parent):
        folder.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    file.unlink(missing_ok=True)  # of a cluster that was killed: two cannot listen on one address
    write_private(file, key.encode())


def _read(url: httpx.URL) -> str:
    """The key for an address; empty if there is none of this user's own."""
    try:
        with key_file(url).open("rb") as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            return file.read(MAX_KEY_BYTES).decode("ascii", "replace").strip() if is_ours else ""
    except (OSError, RuntimeError):
        return ""


def _remove(file: Path, key: str) -> None:
    """Remove the file, unless another cluster put its own there meanwhile, and the folders if they are empty."""
    with contextlib.suppress(OSError):
        if file.read_bytes() == key.encode():
            file.unlink()
        file.parent.rmdir()
        file.parent.parent.rmdir()


def key_file(url: httpx.URL | str) -> Path:
    """Where the key for an address is; homes may be shared by several machines."""
    url = httpx.URL(url)
    host = "127.0.0.1" if url.host == LOCALHOST else url.host
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return FOLDER.expanduser() / f"{socket.gethostname()}_{host}_{url.port or 80}"
