"""Sources that stand still while they are read from, for real."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx

FOR_EVER = {"load_timeout_s": 1e6, "lease_ttl_s": 1e6}
"""Nothing ends by other times than that of an answer."""


@pytest.fixture(params=("tcp,self", None), ids=("tcp", "shared-memory"))
def world(request: pytest.FixtureRequest) -> Iterator[KVWorld]:
    with confined_ucx(transports=request.param):
        world = KVWorld("nixl")
        yield world
        world.close()


@pytest.mark.known_failure(4, 14)
def test_stopped_source_is_not_waited_for_and_used_again_when_it_goes_on(world: KVWorld) -> None:
    reader = world.make_reader(world.spec("reader", answer_timeout_s=10.0, **FOR_EVER))
    source = world.make_source(world.spec("source", **FOR_EVER))
    request_ids = [world.unique("request") for _ in range(3)]
    source.fill((1, 2), world.seed())
    granted = [source.grant(request_id, (1, 2)) for request_id in request_ids]
    assert reader.load(request_ids[0], granted[0], (3, 4)).error is None

    source.child.signal(signal.SIGSTOP)
    reader.begin(request_ids[1], granted[1], (5, 6))
    reader.age_until(lambda: request_ids[1] in reader.stalled)
    assert reader.has_reads()

    source.child.signal(signal.SIGCONT)
    ended = reader.wait_load(request_ids[1])
    assert ended.failed_block_ids == (5, 6)
    assert ended.error == f"{source.spec.engine_id} was silent for 10 s"
    assert not reader.has_reads()
    assert reader.load(request_ids[2], granted[2], (5, 6)).error is None
    assert reader.content((5, 6)) == source.content((1, 2))
