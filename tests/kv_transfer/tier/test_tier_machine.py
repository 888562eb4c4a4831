"""Tiers in a random world: evict, find, load, abort, forget in any order, with real copies in real threads."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.cache_groups import ABSENT_BLOCK
from kv_transfer.chain.source import ChainSource
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from tests.support.kv.kv_world import KVWorld
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)

NUM_CONTENTS = 10
NUM_EVICTABLE = 32
WINDOWS = st.sampled_from([(None,), (None, 6), (6,), (None, 5, 9), (9, 2)])
"""Windows of the KV cache groups, in tokens; blocks have four."""

CHAIN = st.builds(
    lambda begin, length: list(range(begin, begin + length)), st.sampled_from((0, 4)), st.integers(1, NUM_CONTENTS - 4)
)
"""The blocks of a prompt, by content; each group has its own block for it. Prompts overlap."""

Content = tuple[int, int]
"""The content of a block: tokens, and the KV cache group."""


def _hash(content: Content) -> bytes:
    return b"content-%d-%d" % content


class TierMachine(RuleBasedStateMachine):
    """``kept`` is what the answers to evictions say the tier holds; blocks are overwritten as soon as they may be."""

    tier_name: ClassVar[str]

    @initialize(num_slots=st.sampled_from((4, 12, 24)), windows=WINDOWS)
    def start(self, num_slots: int, windows: tuple[int | None, ...]) -> None:
        self.world = KVWorld("inproc", tiers=(self.tier_name,))
        spec = self.world.spec("engine", windows=windows, num_tier_blocks=num_slots)
        self.engine = self.world.make_reader(spec)
        scheduler = self.engine.connector.scheduler
        assert isinstance(scheduler.source, ChainSource)
        assert scheduler.tier is not None
        self.source, self.evicted_to = scheduler.source, scheduler.tier
        (self.tier,) = [part for part in self.source.sources if isinstance(part, TierSchedulerConnector)]
        self.groups = range(len(windows))
        self.all_contents = [(number, group) for number in range(NUM_CONTENTS) for group in self.groups]
        self.kept: set[Content] = set()
        self.expected: dict[str, list[tuple[int, Content]]] = {}
        self.cancelled: set[str] = set()
        self.unwritten: set[int] = set()
        self.free = list(range(NUM_EVICTABLE, self.engine.spec.num_blocks))

    def _byte(self, content: Content) -> int:
        return 1 + self.all_contents.index(content)

    def _sees(self, group: int, index: int, num_blocks: int) -> bool:
        """True when the token behind so many blocks sees the ``index``-th one in a group."""
        window, block_size = self.engine.spec.windows[group], self.engine.spec.block_size
        last_position = (index + 1) * block_size - 1
        return index < num_blocks and (window is None or last_position > num_blocks * block_size - window)

    def _end(self, chain: list[int], num_local: int) -> int:
        """How many blocks of a chain can be used, of which the first ``num_local`` are there."""
        return max(
            (
                end
                for end in range(num_local, len(chain) + 1)
                if all(
                    (chain[index], group) in self.kept
                    for group in self.groups
                    for index in range(num_local, end)
                    if self._sees(group, index, end)
                )
            ),
            default=num_local,
        )

    def _match(self, chain: list[int], num_local: int) -> int:
        """How many blocks the tier offers behind so many."""
        hashes = tuple(tuple(_hash((number, group)) for number in chain) for group in self.groups)
        block_size = self.engine.spec.block_size
        return self.engine.match(None, 99, num_local * block_size, hashes).num_tokens // block_size

    @rule(chain=CHAIN, missing=st.sets(st.tuples(st.integers(0, NUM_CONTENTS), st.integers(0, 2)), max_size=2))
    def evict(self, chain: list[int], missing: set[Content]) -> None:
        """The blocks of a prompt, tail first, but for some that stay in the cache."""
        contents = [(number, group) for number in reversed(chain) for group in self.groups]
        contents = [content for content in contents if content not in missing]
        block_ids = [block_id for block_id in range(NUM_EVICTABLE) if block_id not in self.unwritten][: len(contents)]
        contents = contents[: len(block_ids)]
        for block_id, content in zip(block_ids, contents, strict=True):
            self.engine.memory[block_id] = self._byte(content)
        lost = self.evicted_to.keep_evicted(block_ids, [_hash(content) for content in contents])
        self.unwritten.update(block_ids)
        self.kept.update(contents)
        self.kept -= {content for content in self.all_contents if _hash(content) in lost}

    @rule(chain=CHAIN, num_local=st.integers(0, 3), num_behind=st.integers(0, 3))
    def find_and_load(self, chain: list[int], num_local: int, num_behind: int) -> None:
        """``num_behind`` blocks come from elsewhere: of a window only what is seen from their end is loaded."""
        num_local = min(num_local, len(chain))
        end = self._end(chain, num_local)
        assert self._match(chain, num_local) == end - num_local
        wanted = [
            (index, group)
            for index in range(num_local, end)
            for group in self.groups
            if self._sees(group, index, end) and (index, group) in self._seen_from(end + num_behind)
        ]
        if not wanted or len(wanted) > len(self.free):
            return
        block_of = {place: self.free.pop() for place in wanted}
        tables = tuple(
            tuple(block_of.get((index, group), ABSENT_BLOCK) for index in range(num_local, end))
            for group in self.groups
        )
        request_id = self.world.unique("request")
        self.source.begin_load(request_id=request_id, params=None, first_block=num_local, block_ids=tables)
        self.expected[request_id] = [(block_id, (chain[index], group)) for (index, group), block_id in block_of.items()]

    def _seen_from(self, num_blocks: int) -> set[tuple[int, int]]:
        places = ((index, group) for index in range(num_blocks) for group in self.groups)
        return {(index, group) for index, group in places if self._sees(group, index, num_blocks)}

    @rule(chain=CHAIN)
    def find_and_leave(self, chain: list[int]) -> None:
        self._match(chain, 0)

    @rule()
    def step(self) -> None:
        """A step begins: from now on the evicted blocks belong to others."""
        self.engine.step()
        for block_id in self.unwritten:
            self.engine.memory[block_id] = 0xFF
        self.unwritten.clear()

    @rule(number=st.integers(0, 5))
    def abort(self, number: int) -> None:
        """One of the loads, if there is any: what a disk keeps depends on its speed, and rules must not."""
        if self.expected:
            request_id = sorted(self.expected)[number % len(self.expected)]
            self.cancelled.add(request_id)
            self.source.cancel_load(request_id)

    @rule(is_reset=st.sampled_from((False, False, False, True)))
    def forget(self, is_reset: bool) -> None:
        if is_reset:
            self.evicted_to.forget_evicted()
            self.kept.clear()

    @rule()
    def settle(self) -> None:
        """Everything that was begun ends, and what was loaded is what was evicted."""
        self.step()
        for request_id, loaded in self.expected.items():
            ended = self.engine.wait_load(request_id)
            if ended.failed_block_ids:
                assert request_id in self.cancelled
            else:
                for block_id, content in loaded:
                    assert set(self.engine.content((block_id,))) == {self._byte(content)}
            self.free.extend(block_id for block_id, _ in loaded)
        self.expected.clear()
        self.cancelled.clear()
        wait_until(self._holds_nothing)

    def _holds_nothing(self) -> bool:
        self.engine.collect()
        return not self.tier.num_loading

    @invariant()
    def pins_and_content_agree(self) -> None:
        self.tier.check_integrity()
        assert {content for content in self.all_contents if _hash(content) in self.tier.slots} == self.kept
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
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)

TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = _SETTINGS
TestDiskTierMachine = DiskTierMachine.TestCase
TestDiskTierMachine.settings = _SETTINGS
