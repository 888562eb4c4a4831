"""The admin key that `baton serve` makes for itself if none is configured.

While the cluster runs, the key is in a file in this user's home, named after the API's address. There `baton drain`,
`baton chaos` and `baton status` of the same user find it. The process that made the file holds a lock on it. So a later
command recognises the key of a cluster that was killed, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx

from cluster.config.api_url import base_url
from cluster.config.config import BatonConfig
from cluster.config.private_files import write_private
from router.errors import OWN_ADMIN_KEY_FOLDER
from router.security import hash_key, new_key

FOLDER = Path(OWN_ADMIN_KEY_FOLDER)
MAX_KEY_BYTES = 1000
LOCALHOST = "localhost"
PRIVATE_FOLDER = 0o700
CONNECT_TIMEOUT_S = 0.5


@contextlib.contextmanager
def own_admin_key(config: BatonConfig, tell: Callable[[str], None]) -> Iterator[str | None]:
    """The hash of a new key, whose file exists until the block ends; None if admin keys are configured.

    If the file cannot be written, ``tell`` is called with the reason. Then there is no key, and orders are refused.
    """
    if config.security_settings().has_configured_admin_keys:
        yield None
        return
    key = new_key()
    try:
        _remove_left_over()
        file, held = _stored(key, base_url(config))
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
        held.close()


def with_own_key(url: str, api_key: str, *, is_for_orders: bool = True) -> tuple[str, str]:
    """The URL and the key for a cluster. If this user has an own cluster at the URL, its key is used when no key was
    given, or when the given key is not meant for orders (``is_for_orders`` False).

    This works only for addresses, since a name may lead to another user's cluster. For localhost, the returned URL has
    the address at which the user's own cluster listens.
    """
    parsed = httpx.URL(url)
    _remove_left_over()
    if (api_key and is_for_orders) or parsed.scheme != "http":
        return url, api_key
    for host in ("127.0.0.1", "::1") if parsed.host == LOCALHOST else (parsed.host,):
        candidate = parsed.copy_with(host=host)
        if key := _read(candidate):
            return str(candidate), key
    return url, api_key


def _stored(key: str, url: str) -> tuple[Path, BinaryIO]:
    """Write the file with the key. Returns its path and the open file, whose lock ends with this process.

    Another cluster that ends may remove the empty folder at this moment, so a second attempt is made.
    """
    file = key_file(url)
    try:
        return file, _store(key, file)
    except FileNotFoundError:
        return file, _store(key, file)


def _store(key: str, file: Path) -> BinaryIO:
    for folder in (file.parent.parent, file.parent):
        folder.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    write_private(new, key.encode())
    held = new.open("rb")
    fcntl.flock(held, fcntl.LOCK_EX)  # before the file has its name, so that no command takes it for a leftover
    new.replace(file)  # a file found there is a killed cluster's: two clusters cannot listen on one address
    return held


def _remove_left_over() -> None:
    """Remove the keys of killed clusters: no process holds their locks, and nothing listens at their addresses."""
    with contextlib.suppress(OSError, RuntimeError):
        for file in FOLDER.expanduser().glob(f"{socket.gethostname()}_*"):
            with contextlib.suppress(OSError), file.open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_refused(file) and os.path.samestat(os.fstat(opened.fileno()), file.stat()):
                    file.unlink()


def _is_refused(file: Path) -> bool:
    """True when nothing listens at the address in a file's name. A cluster on another Ray outlives its command."""
    _, host, port = file.name.rsplit("_", 2)
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _read(url: httpx.URL) -> str:
    """The key for an address; empty if there is no file, or another user owns it."""
    try:
        with key_file(url).open("rb") as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            return file.read(MAX_KEY_BYTES).decode("ascii", "replace").strip() if is_ours else ""
    except (OSError, RuntimeError):
        return ""


def _remove(file: Path, key: str) -> None:
    """Remove the file, unless another cluster has replaced it, and then the folders if they are empty."""
    with contextlib.suppress(OSError):
        if file.read_bytes() == key.encode():
            file.unlink()
        file.parent.rmdir()
        file.parent.parent.rmdir()


def key_file(url: httpx.URL | str) -> Path:
    """The file for an address's key. It names the machine, since several machines may share a home."""
    url = httpx.URL(url)
    host = "127.0.0.1" if url.host == LOCALHOST else url.host
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return FOLDER.expanduser() / f"{socket.gethostname()}_{host}_{url.port or 80}"
