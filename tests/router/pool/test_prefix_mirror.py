"""The mirror of the prefix caches compared with plain sets, with and without lost events."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.contract.messages import CacheChanges
from router.pool.prefix_mirror import MAX_LEVELS, PrefixMirror

NAMES = [f"replica-{number}" for number in range(70)]
"""More than fit into one machine word of a mask."""

CHAIN = 12
CHAINS = [tuple(1000 * (number + 1) + place for place in range(CHAIN)) for number in range(5)]
"""Prompts as chains of keys."""


def packed(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)


class MirrorMachine(RuleBasedStateMachine):
    """Replicas that cache the beginnings of chains, compared with the mirror."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = PrefixMirror(100_000)
        self.lengths: dict[str, list[int]] = {}
        self.sequences: dict[str, int] = {}

    def news(self, name: str, *, stored: Sequence[int] = (), removed: Sequence[int] = ()) -> CacheChanges:
        first = self.sequences[name]
        self.sequences[name] = first + len(stored) + len(removed)
        return CacheChanges(
            first_sequence=first, next_sequence=self.sequences[name], stored=packed(stored), removed=packed(removed)
        )

    def snapshot(self, name: str) -> CacheChanges:
        keys = [key for chain, length in zip(CHAINS, self.lengths[name], strict=True) for key in chain[:length]]
        return CacheChanges(first_sequence=0, next_sequence=self.sequences[name], stored=packed(keys), is_snapshot=True)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.lengths:
            self.lengths[name], self.sequences[name] = [0] * len(CHAINS), 0
            assert self.mirror.apply(name, self.snapshot(name))

    @rule(data=st.data(), chain=st.integers(0, len(CHAINS) - 1), length=st.integers(0, CHAIN), is_lost=st.booleans())
    def change(self, data: st.DataObject, chain: int, length: int, is_lost: bool) -> None:
        """A chain grows or loses its tail; where the message is lost, the next one shows it, and a snapshot heals."""
        if not self.lengths:
            return
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        before = self.lengths[name][chain]
        self.lengths[name][chain] = length
        keys = CHAINS[chain]
        news = self.news(name, stored=keys[before:length], removed=keys[length:before])
        if not is_lost:
            assert self.mirror.apply(name, news)
        elif news.next_sequence > news.first_sequence:
            later = self.news(name, stored=(9_000_000 + news.next_sequence,))
            assert not self.mirror.apply(name, later)
            assert self.mirror.num_cached(name, keys) == 0
            assert self.mirror.apply(name, self.snapshot(name))

    @rule(data=st.data())
    def hear_something_old_again(self, data: st.DataObject) -> None:
        if not self.lengths:
            return
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        old = CacheChanges(first_sequence=0, next_sequence=self.sequences[name], removed=packed(CHAINS[0]))
        assert self.mirror.apply(name, old)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.lengths:
            name = data.draw(st.sampled_from(sorted(self.lengths)))
            del self.lengths[name]
            self.mirror.forget(name)

    @invariant()
    def counts_are_those_of_the_replicas(self) -> None:
        for index, chain in enumerate(CHAINS):
            expected = {name: lengths[index] for name, lengths in self.lengths.items() if lengths[index]}
            assert self.mirror.cached_tokens(chain, 1) == expected
            assert self.mirror.cached_tokens(chain[:3], 2) == {
                name: 2 * min(count, 3) for name, count in expected.items()
            }
            assert {name: self.mirror.num_cached(name, chain) for name in expected} == expected
        assert self.mirror.num_blocks == sum(map(sum, self.lengths.values()))


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_first_news_without_a_snapshot_are_a_gap() -> None:
    mirror = PrefixMirror(10)

    assert not mirror.apply("a", CacheChanges(first_sequence=3, next_sequence=4, stored=packed([1])))
    assert mirror.num_blocks == 0


def test_full_mirror_remembers_no_more_until_there_is_room() -> None:
    mirror = PrefixMirror(3)
    chain = (1, 2, 3, 4, 5)
    mirror.apply("a", CacheChanges(first_sequence=0, next_sequence=5, stored=packed(chain), is_snapshot=True))

    assert (mirror.cached_tokens(chain, 1), mirror.num_blocks, mirror.num_dropped) == ({"a": 3}, 3, 1)

    mirror.apply("a", CacheChanges(first_sequence=5, next_sequence=9, stored=packed((7, 8)), removed=packed((2, 3))))

    assert (mirror.cached_tokens(chain, 1), mirror.cached_tokens((7, 8), 1)) == ({"a": 1}, {"a": 2})


def test_overlap_of_a_snapshot_and_the_news_around_it_changes_nothing() -> None:
    mirror = PrefixMirror(10)
    mirror.apply("a", CacheChanges(first_sequence=0, next_sequence=6, stored=packed((1, 2)), is_snapshot=True))

    assert mirror.apply(
        "a", CacheChanges(first_sequence=4, next_sequence=7, stored=packed((2, 3)), removed=packed((9,)))
    )
    assert mirror.cached_tokens((1, 2, 3), 1) == {"a": 3}


@given(length=st.integers(0, 500), num_keys=st.integers(1, 500))
def test_long_prompt_is_never_overrated_and_known_to_a_sixteenth(length: int, num_keys: int) -> None:
    keys = tuple(range(1, num_keys + 1))
    length = min(length, num_keys)
    mirror = PrefixMirror(1000)
    mirror.apply("a", CacheChanges(first_sequence=0, next_sequence=1, stored=packed(keys[:length]), is_snapshot=True))

    known = mirror.cached_tokens(keys, 1).get("a", 0)

    assert length - -(-num_keys // MAX_LEVELS) < known <= length or known == length
    assert mirror.num_cached("a", keys) == length
