"""Two clusters at one address of a machine."""

from __future__ import annotations

import pytest

from cluster.config.config import BatonConfig
from cluster.deploy.address_hold import holding_address
from cluster.plan.preflight import PreflightError
from tests.support.cluster.ports import free_port


def test_second_cluster_at_an_address_is_refused_until_the_first_is_gone() -> None:
    port = free_port()
    first, second, elsewhere = (
        BatonConfig(port=number, host=host)
        for number, host in ((port, "127.0.0.1"), (port, "localhost"), (free_port(), "127.0.0.1"))
    )
    with holding_address(first):
        with holding_address(elsewhere):
            pass
        with pytest.raises(PreflightError, match=rf"another `baton serve` .*:{port}: stop it, or choose another"):
            holding_address(second).__enter__()

    with holding_address(first):
        pass
