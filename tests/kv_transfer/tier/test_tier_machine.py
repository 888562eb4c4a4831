"""Tiers in a random world: evict, find, load, abort, forget in any order, with real copies in real threads."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.chain.source import ChainSource
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from tests.support.engine.kv_engine import wait_until
from tests.support.kv.kv_world import KVWorld

pytestmark = pytest.mark.timeout(300)

NUM_CONTENTS = 12
NUM_EVICTABLE = 16
CONTENTS = st.lists(st.integers(0, NUM_CONTENTS - 1), min_size=1, max_size=6, unique=True)


def _hash(content: int) -> bytes:
    return b"content-%d" % content


class TierMachine(RuleBasedStateMachine):
    """``kept`` is what the answers to evictions say the tier holds; blocks are overwritten as soon as they may be."""

    tier_name: ClassVar[str]

    @initialize(num_slots=st.integers(1, 10))
    def start(self, num_slots: int) -> None:
        self.world = KVWorld("inproc", tiers=(self.tier_name,))
        spec = self.world.spec("engine", **{f"num_{self.tier_name}_blocks": num_slots})
        self.engine = self.world.make_reader(spec)
        scheduler = self.engine.connector.scheduler
        assert isinstance(scheduler.source, ChainSource)
        assert scheduler.tier is not None
        self.source, self.evicted_to = scheduler.source, scheduler.tier
        (self.tier,) = [part for part in self.source.sources if isinstance(part, TierSchedulerConnector)]
        self.kept: set[int] = set()
        self.expected: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        self.cancelled: set[str] = set()
        self.unwritten: set[int] = set()
        self.free = list(range(NUM_EVICTABLE, self.engine.spec.num_blocks))

    def _content(self, content: int) -> bytes:
        return bytes([content + 1]) * self.engine.spec.layout.block_bytes

    @rule(contents=CONTENTS)
    def evict(self, contents: list[int]) -> None:
        block_ids = [block_id for block_id in range(NUM_EVICTABLE) if block_id not in self.unwritten][: len(contents)]
        contents = contents[: len(block_ids)]
        for block_id, content in zip(block_ids, contents, strict=True):
            self.engine.memory[block_id] = content + 1
        lost = self.evicted_to.keep_evicted(block_ids, [_hash(content) for content in contents])
        self.unwritten.update(block_ids)
        self.kept.update(contents)
        self.kept -= {content for content in range(NUM_CONTENTS) if _hash(content) in lost}

    @rule(contents=CONTENTS, takes=st.integers(1, 6))
    def find_and_load(self, contents: list[int], takes: int) -> None:
        run = next((index for index, content in enumerate(contents) if content not in self.kept), len(contents))
        num_tokens = self.engine.match(None, 99, 0, (tuple(map(_hash, contents)),)).num_tokens
        assert num_tokens == run * self.engine.spec.block_size
        wanted = contents[: min(run, takes, len(self.free))]
        if wanted:
            request_id = self.world.unique("request")
            block_ids = tuple(self.free.pop() for _ in wanted)
            self.source.begin_load(request_id=request_id, params=None, first_block=0, block_ids=(block_ids,))
            self.expected[request_id] = (block_ids, wanted)

    @rule(contents=CONTENTS)
    def find_and_leave(self, contents: list[int]) -> None:
        self.engine.match(None, 99, 0, (tuple(map(_hash, contents)),))

    @rule()
    def step(self) -> None:
        """A step begins: from now on the evicted blocks belong to others."""
        self.engine.step()
        for block_id in self.unwritten:
            self.engine.memory[block_id] = 0xFF
        self.unwritten.clear()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.cancelled.add(request_id)
        self.source.cancel_load(request_id)

    @rule()
    def forget(self) -> None:
        self.evicted_to.forget_evicted()
        self.kept.clear()

    @rule()
    def settle(self) -> None:
        """Everything that was begun ends, and what was loaded is what was evicted."""
        self.step()
        for request_id, (block_ids, contents) in self.expected.items():
            ended = self.engine.wait_load(request_id)
            if ended.failed_block_ids:
                assert request_id in self.cancelled
            else:
                assert self.engine.content(block_ids) == b"".join(map(self._content, contents))
            self.free.extend(block_ids)
        self.expected.clear()
        self.cancelled.clear()
        wait_until(self._holds_nothing)

    def _holds_nothing(self) -> bool:
        self.engine.collect()
        return not self.tier.num_loading

    @invariant()
    def pins_and_content_agree(self) -> None:
        self.tier.check_integrity()
        assert {content for content in range(NUM_CONTENTS) if _hash(content) in self.tier.slots} == self.kept
        assert len(self.kept) <= self.tier.slots.num_slots

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.settle()
            self.tier.check_integrity()
            self.world.close()


class HostTierMachine(TierMachine):
    """Slots in main memory."""

    tier_name = "host"


class DiskTierMachine(TierMachine):
    """Slots in files."""

    tier_name = "disk"


_SETTINGS = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)

TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = _SETTINGS
TestDiskTierMachine = DiskTierMachine.TestCase
TestDiskTierMachine.settings = _SETTINGS
