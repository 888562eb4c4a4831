"""What a router remembers of the others: which ones run, which are gone, and their counters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from router.report.router_report import MAX_DEPARTED, NoPeers, RouterBoard, RouterReport
from tests.support.router.router_peers import report_of
from tests.support.router.router_rig import until


@dataclass(slots=True)
class Coming:
    """Peers that come and go. ``gone`` is what they report of departed routers."""

    names: list[str] = field(default_factory=list)
    gone: tuple[RouterReport, ...] = ()

    def peer_ids(self) -> list[str]:
        return self.names

    async def farewell(self, router_id: str, report: RouterReport, *, timeout_s: float) -> None:
        raise AssertionError(f"{router_id} was told of {report.router_id}")

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        return report_of(router_id, gone=self.gone)


async def test_only_so_many_routers_are_remembered() -> None:
    peers = Coming()
    board = RouterBoard(peers, own_id="me")
    for number in range(MAX_DEPARTED + 10):
        peers.names = [f"router-{number}"]
        await board.refresh(timeout_s=1.0)

    assert len(board.others) == MAX_DEPARTED + 1


async def test_routers_that_went_are_not_forgotten_and_remembered_in_turn() -> None:
    went = [report_of(f"router-{number}", created_s=number) for number in range(MAX_DEPARTED + 6)]
    peers = [Coming(names=["other"]), Coming(names=["other"])]
    boards = [RouterBoard(peer, own_id="me") for peer in peers]
    for board, order in zip(boards, (went, went[::-1]), strict=True):
        for report in order:
            board.note_farewell(report)
        await board.refresh(timeout_s=1.0)
    remembered = [{report.router_id for report in boards[0].gone()}]
    for _ in range(3):
        peers[0].gone, peers[1].gone = boards[1].gone(), boards[0].gone()
        for board in boards:
            await board.refresh(timeout_s=1.0)
            remembered.append({report.router_id for report in board.gone()})

    assert remembered == [{report.router_id for report in went[6:]}] * len(remembered)


class SlowPeers(NoPeers):
    """One other router, which answers when it is let."""

    def __init__(self) -> None:
        self.ids = ["one"]
        self.answers: list[asyncio.Future[RouterReport]] = []

    def peer_ids(self) -> list[str]:
        return self.ids

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


@pytest.mark.parametrize("last_word", ["before a later question", "after it"])
async def test_answer_to_an_earlier_question_brings_no_router_back(last_word: str) -> None:
    peers = SlowPeers()
    board = RouterBoard(peers, own_id="me")
    board.note_farewell(report_of("before"))
    early = asyncio.create_task(board.refresh(timeout_s=60))
    await until(lambda: len(peers.answers) == 1)
    peers.ids = []
    if last_word == "before a later question":
        board.note_farewell(report_of("one"))
    await board.refresh(timeout_s=60)
    if last_word == "after it":
        board.note_farewell(report_of("one"))

    peers.answers[0].set_result(report_of("one", num_finished=1))

    states = {known.report.router_id: known.state for known in await early}
    assert states == {"before": "departed", "one": "departed"}
