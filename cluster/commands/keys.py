"""`baton keys`: makes API keys, and the hashes of them that the configuration takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from cluster.config.config import BatonConfig
from cluster.config.config_section import Section
from cluster.plan.preflight import PreflightError
from router.security import MIN_KEY_CHARACTERS, SecurityError, hash_key, new_key


def print_new_key(output: TextIO, notes: TextIO) -> None:
    """Print a new key and its hash. Nothing keeps the key."""
    key = new_key()
    print(f"key   {key}\nhash  {hash_key(key)}", file=output)
    print(
        "Give the key to a user of the API, and put the hash into security.api_keys or security.admin_keys.", file=notes
    )


def print_hash(keys: TextIO, output: TextIO) -> None:
    """Print the hash of a key that was made elsewhere, read so that it is on no command line.

    Raises:
        PreflightError: It is too short to be a random key: its hash could be reversed by guessing.
    """
    print(checked_hash(keys.readline().strip()), file=output)


def checked_hash(key: str) -> str:
    """The hash of a key that was made elsewhere.

    Raises:
        PreflightError: It is too short to be a random key. The message does not repeat it.
    """
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise PreflightError(
            f"a key must have at least {MIN_KEY_CHARACTERS} visible, random ASCII characters; `baton keys new` makes "
            "one"
        )
    return hash_key(key)


def with_api_keys(config: BatonConfig, keys: Sequence[str]) -> BatonConfig:
    """The configuration with the hashes of these keys, unless it has them: they open the API besides its own.

    Raises:
        PreflightError: One is too short, or a file of keys cannot be read.
    """
    if not keys:
        return config
    try:
        hashes = dict.fromkeys(checked_hash(key) for key in keys)
        known = config.security_settings().loaded()
    except PreflightError as error:
        raise PreflightError(f"--api-key (or its variable BATON_API_KEY): {error}") from error
    except SecurityError as error:
        raise PreflightError(str(error)) from error
    new = tuple(text for text in hashes if text not in (*known.api_keys, *known.admin_keys))
    if not new:
        return config
    section: Section = config.security
    keys_of_file = config.security_settings().api_keys
    return config.model_copy(update={"security": section.model_copy(update={"api_keys": keys_of_file + new})})
