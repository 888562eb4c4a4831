"""A source's announcements of prompts that it computes: to whom, how much, and under which epoch."""

from __future__ import annotations

from kv_transfer.peer.announcements import Announced, Announcements
from kv_transfer.peer.notifications import Announce
from tests.support.clock import ManualClock

TTL_S = 30.0


def _make() -> tuple[Announcements, ManualClock]:
    clock = ManualClock()
    return Announcements(ttl_s=TTL_S, clock=clock), clock


def _told(announcements: Announcements) -> list[tuple[str, Announce]]:
    return announcements.take_due()


def test_reader_is_told_of_what_was_there_before_and_of_each_addition_once() -> None:
    announcements, _ = _make()
    announcements.announce("r", places=(0, 1), block_ids=(7, 8))
    announcements.subscribe("r", "reader")
    first = _told(announcements)
    announcements.announce("r", places=(2,), block_ids=(9,))

    assert [(sender, told.places, told.block_ids) for sender, told in first] == [("reader", (0, 1), (7, 8))]
    assert [told.block_ids for _, told in _told(announcements)] == [(9,)]
    assert _told(announcements) == []


def test_reader_may_come_before_the_prompt() -> None:
    announcements, _ = _make()
    announcements.subscribe("r", "reader")
    assert _told(announcements) == []

    announcements.announce("r", places=(0,), block_ids=(7,))

    assert [told.block_ids for _, told in _told(announcements)] == [(7,)]


def test_withdrawn_prompt_begins_a_new_epoch_and_its_reader_learns_of_it() -> None:
    announcements, _ = _make()
    announcements.subscribe("r", "reader")
    announcements.announce("r", places=(0,), block_ids=(7,))
    ((_, before),) = _told(announcements)
    announcements.withdraw("r")
    ((_, withdrawn),) = _told(announcements)
    announcements.announce("r", places=(0,), block_ids=(7,))
    ((_, after),) = _told(announcements)

    assert before.epoch < withdrawn.epoch < after.epoch
    assert (withdrawn.block_ids, after.block_ids) == ((), (7,))
    assert announcements.finish("r", (7, 8)) == Announced(epoch=after.epoch)


def test_prompt_that_was_handed_over_leaves_nothing() -> None:
    announcements, _ = _make()
    announcements.subscribe("r", "reader")
    announcements.announce("r", places=(0,), block_ids=(7,))

    assert announcements.finish("r", (7, 8)).epoch == 1
    assert (_told(announcements), announcements.num_open) == ([], 0)
    assert announcements.finish("r", (7, 8)) == Announced()


def test_subscription_ends_unless_it_is_renewed() -> None:
    announcements, clock = _make()
    announcements.subscribe("forgotten", "reader")
    announcements.subscribe("renewed", "reader")
    clock.advance(TTL_S / 2)
    announcements.subscribe("renewed", "reader")
    clock.advance(TTL_S / 2)
    announcements.subscribe("another", "reader")
    for request_id in ("forgotten", "renewed"):
        announcements.announce(request_id, places=(0,), block_ids=(1,))

    assert [told.request_id for _, told in _told(announcements)] == ["renewed"]


def test_long_prompt_is_told_in_several_messages() -> None:
    announcements, _ = _make()
    announcements.announce("r", places=tuple(range(600)), block_ids=tuple(range(600)))
    announcements.subscribe("r", "reader")

    told = [announce for _, announce in _told(announcements)]

    assert [announce.places[0] for announce in told] == [0, 256, 512]
    assert sum((announce.block_ids for announce in told), ()) == tuple(range(600))


def test_another_reader_is_told_from_the_start() -> None:
    announcements, _ = _make()
    announcements.announce("r", places=(0,), block_ids=(7,))
    announcements.subscribe("r", "first")
    _told(announcements)

    announcements.subscribe("r", "second")

    assert [(sender, told.block_ids) for sender, told in _told(announcements)] == [("second", (7,))]


def test_paced_reader_is_told_of_all_that_is_new_once_a_period() -> None:
    clock = ManualClock()
    announcements = Announcements(ttl_s=TTL_S, clock=clock, period_s=1.0)
    announcements.subscribe("r", "reader")
    told: list[tuple[int, ...]] = []
    for number in range(10):
        announcements.announce("r", places=(number,), block_ids=(number,))
        told += [message.block_ids for _, message in _told(announcements)]
        clock.now_s += 0.25
    assert announcements.has_due
    clock.now_s += 0.5
    told += [message.block_ids for _, message in _told(announcements)]

    assert told == [(0, 1, 2, 3, 4), (5, 6, 7, 8), (9,)]
    assert not announcements.has_due


def test_paced_reader_learns_at_once_that_an_announcement_is_void() -> None:
    clock = ManualClock()
    announcements = Announcements(ttl_s=TTL_S, clock=clock, period_s=1.0)
    announcements.subscribe("r", "reader")
    announcements.announce("r", places=(0,), block_ids=(7,))
    assert _told(announcements) == []

    announcements.withdraw("r")

    assert [(message.block_ids, message.checksums) for _, message in _told(announcements)] == [((), None)]
