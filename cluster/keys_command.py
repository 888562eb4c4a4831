"""`baton keys`: makes API keys, and the hashes of them that the configuration takes."""

from __future__ import annotations

from typing import TextIO

from cluster.preflight_error import PreflightError
from router.security import MIN_KEY_CHARACTERS, hash_key, new_key


def print_new_key(output: TextIO, notes: TextIO) -> None:
    """Print a new key and its hash. Nothing keeps the key."""
    key = new_key()
    print(f"key   {key}\nhash  {hash_key(key)}", file=output)
    print("Give the key to whoever may use the API; put the hash into security.api_keys or admin_keys.", file=notes)


def print_hash(keys: TextIO, output: TextIO) -> None:
    """Print the hash of a key that was made elsewhere, read so that it is on no command line.

    Raises:
        PreflightError: It is too short to be a random key: its hash could be reversed by guessing.
    """
    key = keys.readline().strip()
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise PreflightError(
            f"a key has at least {MIN_KEY_CHARACTERS} visible ASCII characters, all random; `baton keys new` makes one"
        )
    print(hash_key(key), file=output)
