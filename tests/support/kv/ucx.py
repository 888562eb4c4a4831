"""Restricts the transports of UCX for agents that a test makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def confined_ucx(*, transports: str | None = None) -> Iterator[None]:
    """Agents made inside the block, here and in child processes, only use the loopback interface and these transports,
    if any are given.

    Left to itself UCX takes every interface of the machine, those too that others make and remove meanwhile.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        if transports is None:
            patch.delenv("UCX_TLS", raising=False)
        else:
            patch.setenv("UCX_TLS", transports)
        yield
