"""The version of Baton."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def baton_version() -> str:
    """The installed version."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0+unknown"
