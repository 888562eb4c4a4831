"""Prompts that this engine computes and will hand over: their complete blocks, and the readers that subscribed."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.memory.block_memory import BlockMemory
from kv_transfer.peer.notifications import Announce

_MAX_SUBSCRIPTIONS = 4096
_MAX_BLOCKS_PER_MESSAGE = 256


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """The complete blocks of a prompt in one attempt to compute it. Under one ``epoch`` no announced block changes."""

    epoch: int
    next_tell_s: float
    places: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Subscription:
    """A reader, the last epoch that it was told of, and how many of that epoch's blocks."""

    sender: str
    until_s: float
    epoch: int = 0
    num_told: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The announcements for a prompt that is complete now: their epoch, and ``checksums`` by block id."""

    epoch: int = 0
    checksums: Mapping[int, int] = field(default_factory=dict)


class Announcements:
    """Announcements of complete blocks, and their subscribers. Safe to call from any thread.

    The engine's thread announces; the connector's thread subscribes readers and sends to them. An epoch lasts from a
    prompt's first announcement until the prompt is withdrawn or handed over. Each epoch has a unique number. With
    ``memory`` each block's checksum is computed once, when the block is announced. A reader is told of new blocks at
    most once per ``period_s``, and not at all if the prompt takes less time. ``on_change`` is called, outside the lock,
    when there is something to send.
    """

    def __init__(
        self, *, ttl_s: float, clock: Callable[[], float], memory: BlockMemory | None = None, period_s: float = 0.0
    ) -> None:
        self.on_change: Callable[[], None] | None = None
        self.num_announced_blocks = 0
        self._ttl_s = ttl_s
        self._clock = clock
        self._period_s = period_s
        self._memory = memory
        self._lock = threading.Lock()
        self._epochs = itertools.count(1)
        self._prompts: dict[str, _Prompt] = {}
        self._subscriptions: OrderedDict[str, _Subscription] = OrderedDict()
        self._due: dict[str, None] = {}

    @property
    def num_open(self) -> int:
        """Prompts that are still computed and have announced blocks."""
        return len(self._prompts)

    @property
    def is_paced(self) -> bool:
        """True when announcements are delayed to save CPU time (``period_s`` above 0)."""
        return self._period_s > 0

    @property
    def has_due(self) -> bool:
        """True while announcements wait to be sent."""
        return bool(self._due)

    def announce(self, request_id: str, *, places: Sequence[int], block_ids: Sequence[int]) -> None:
        """Announce complete blocks of a prompt. All ``places`` (``block_place``) come after those announced before."""
        checksums = self._memory.checksums(block_ids) if self._memory is not None else ()
        with self._lock:
            prompt = self._prompts.get(request_id)
            if prompt is None:
                prompt = self._prompts[request_id] = _Prompt(
                    epoch=next(self._epochs), next_tell_s=self._clock() + self._period_s
                )
            assert not prompt.places or prompt.places[-1] < places[0], "blocks are announced in order"
            prompt.places.extend(places)
            prompt.block_ids.extend(block_ids)
            prompt.checksums.extend(checksums)
            self.num_announced_blocks += len(block_ids)
            is_wanted = self._mark(request_id)
        self._changed(is_wanted)

    def withdraw(self, request_id: str) -> None:
        """Make all announcements of a prompt void, and tell its reader."""
        with self._lock:
            if self._prompts.pop(request_id, None) is None:
                return
            is_wanted = self._mark(request_id)
        self._changed(is_wanted)

    def finish(self, request_id: str, block_ids: Sequence[int]) -> Announced:
        """End a prompt that is complete. A lease takes over its blocks, and tells the reader of those not announced."""
        with self._lock:
            prompt = self._prompts.pop(request_id, None)
            self._subscriptions.pop(request_id, None)
            self._due.pop(request_id, None)
        if prompt is None:
            return Announced()
        assert set(prompt.block_ids) <= set(block_ids), "an announced block was replaced"
        return Announced(epoch=prompt.epoch, checksums=dict(zip(prompt.block_ids, prompt.checksums, strict=False)))

    def subscribe(self, request_id: str, sender: str) -> None:
        """Tell ``sender`` of a prompt's blocks for one time-to-live from now. The prompt need not have begun yet."""
        now_s = self._clock()
        with self._lock:
            known = self._subscriptions.pop(request_id, None)
            if known is None or known.sender != sender:
                known = _Subscription(sender=sender, until_s=now_s)
            known.until_s = now_s + self._ttl_s
            self._subscriptions[request_id] = known
            while self._subscriptions and (
                len(self._subscriptions) > _MAX_SUBSCRIPTIONS or self._oldest().until_s <= now_s
            ):
                self._due.pop(self._subscriptions.popitem(last=False)[0], None)
            if request_id in self._prompts:
                self._mark(request_id)

    def take_due(self) -> list[tuple[str, Announce]]:
        """Take the announcements that are due now, each with the name of its receiver."""
        if not self._due:
            return []
        now_s = self._clock()
        messages: list[tuple[str, Announce]] = []
        with self._lock:
            for request_id in [request_id for request_id in self._due if self._may_tell(request_id, now_s)]:
                del self._due[request_id]
                messages += self._news(request_id, self._subscriptions[request_id])
        return messages

    def _may_tell(self, request_id: str, now_s: float) -> bool:
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return True
        if now_s < prompt.next_tell_s:
            return False
        prompt.next_tell_s = now_s + self._period_s
        return True

    def _news(self, request_id: str, reader: _Subscription) -> list[tuple[str, Announce]]:
        prompt = self._prompts.get(request_id)
        if prompt is None:
            reader.epoch, reader.num_told = next(self._epochs), 0
            return [(reader.sender, Announce(request_id=request_id, epoch=reader.epoch, places=(), block_ids=()))]
        if reader.epoch != prompt.epoch:
            reader.epoch, reader.num_told = prompt.epoch, 0
        starts = range(reader.num_told, len(prompt.block_ids), _MAX_BLOCKS_PER_MESSAGE)
        reader.num_told = len(prompt.block_ids)
        return [
            (
                reader.sender,
                Announce(
                    request_id=request_id,
                    epoch=prompt.epoch,
                    places=tuple(prompt.places[start : start + _MAX_BLOCKS_PER_MESSAGE]),
                    block_ids=tuple(prompt.block_ids[start : start + _MAX_BLOCKS_PER_MESSAGE]),
                    checksums=tuple(prompt.checksums[start : start + _MAX_BLOCKS_PER_MESSAGE]) or None,
                ),
            )
            for start in starts
        ]

    def _mark(self, request_id: str) -> bool:
        if request_id in self._subscriptions:
            self._due[request_id] = None
            return True
        return False

    def _oldest(self) -> _Subscription:
        return next(iter(self._subscriptions.values()))

    def _changed(self, is_wanted: bool) -> None:
        on_change = self.on_change  # read once: the connector's thread resets it when it ends
        if is_wanted and on_change is not None:
            on_change()
