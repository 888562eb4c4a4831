"""Admission control: a bounded, ordered queue for room in the decode replicas' KV caches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.role import Work
from router.errors import NoReplicaError, QueueFullError
from router.key_shares import KeyShares
from router.pool.demand import Demand
from router.pool.fair_line import FairLine, Place
from router.pool.placing import Placed, Placement, PolicyPlacement
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica, Reservation
from router.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomWish:
    """The blocks that the choices of one prompt need on a decode replica.

    ``num_blocks`` is the need of one choice alone, ``num_own_blocks`` that of each further one: choices share the
    prompt's full blocks, but each has its own last block, where its output continues.
    """

    demand: Demand
    num_blocks: int
    num_own_blocks: int
    priority: int
    num_choices: int = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """What an accepted request holds: room, or a guaranteed place in the queue.

    ``placed`` is the placement decision behind its room. ``prompt_room`` is its turn on another replica that computes
    the prompt, if both were decided together. ``turn`` is set once the request has joined the queue, and ``place`` is
    its position there. Later choices of a prompt join only once the first one has begun; until then their places are
    kept.
    """

    wish: RoomWish
    order: int
    reservation: Reservation | None = None
    placed: Placed | None = None
    prompt_room: Reservation | None = None
    turn: asyncio.Future[None] | None = None
    place: Place[Ticket] | None = None

    def give_back(self) -> None:
        """Release its reservations. Idempotent."""
        for room in (self.reservation, self.prompt_room):
            if room is not None:
                room.release()
        self.reservation = self.placed = self.prompt_room = None


class Admission:
    """Grants each request room on a decode replica before anything is computed for it.

    While no replica has room, requests wait in order of (priority, arrival), and API keys take turns (``FairLine``).
    Smaller requests do not overtake the first one, or it might wait forever. A request that ``enter`` admitted is not
    refused later for lack of room.
    """

    def __init__(self, pool: ReplicaPool, *, settings: RouterSettings, placement: Placement | None = None) -> None:
        """``placement`` None chooses by the policy of the pool."""
        self._pool = pool
        self._placement = placement or PolicyPlacement(pool)
        self._settings = settings
        self._queue: FairLine[Ticket] = FairLine()
        self._places: KeyShares[Ticket] = KeyShares(settings.max_num_queued)
        self._order = itertools.count()
        self._granting: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for room on a decode replica."""
        return len(self._queue)

    def enter(self, wishes: Sequence[RoomWish]) -> list[list[Ticket]]:
        """Admit all choices of all prompts of one body, or none of them.

        Each choice gets room now, or one of the ``max_num_queued`` places in the queue.

        Returns:
            The choices' tickets, prompt by prompt. Each is used in ``room`` once, and given back to ``leave``.

        Raises:
            NoReplicaError: No decode replica is healthy.
            QueueFullError: Some choice finds neither room nor a place.
        """
        entered = [[Ticket(wish=wish, order=next(self._order)) for _ in range(wish.num_choices)] for wish in wishes]
        for choices in entered:
            if self._queue or not self._take_now(choices):
                break
        tickets = [ticket for choices in entered for ticket in choices]
        waiting = [ticket for ticket in tickets if ticket.reservation is None]
        try:
            self._check_places(waiting, num_choices=len(tickets))
        except (NoReplicaError, QueueFullError):
            for ticket in tickets:
                self.leave(ticket)
            raise
        for ticket in waiting:  # including choices whose first one has not begun
            self._places.add(ticket, owner=ticket.wish.demand.owner)
        for choices in entered:
            if choices[0].reservation is None:
                self._stand_in_line(choices[0])
        return entered

    async def room(self, ticket: Ticket, *, beside: Replica | None = None) -> Reservation:
        """Wait for the room of an admitted request. The caller bounds the wait.

        ``beside`` is the replica of the prompt's first choice, where this one shares the prompt's blocks.

        Raises:
            NoReplicaError: No decode replica was healthy for ``recovery_wait_s`` while this request waited.
        """
        if ticket.reservation is not None and not self._pool.is_usable(ticket.reservation.replica):
            ticket.give_back()
        if ticket.reservation is None and ticket.turn is None:
            ticket.reservation = self._try_beside(beside, ticket.wish) if beside is not None else None
            if ticket.reservation is None and not self._queue:
                self._try(ticket)
            if ticket.reservation is None:
                self._stand_in_line(ticket)
        try:
            if ticket.turn is not None:
                await ticket.turn
        except BaseException:
            self.leave(ticket)
            raise
        self._places.discard(ticket)
        assert ticket.reservation is not None
        return ticket.reservation

    def leave(self, ticket: Ticket) -> None:
        """Give back everything that a ticket holds. Idempotent."""
        self._places.discard(ticket)
        self._leave_line(ticket)
        if ticket.reservation is not None:
            ticket.give_back()
        elif ticket.turn is not None:
            if not ticket.turn.cancel() and not ticket.turn.cancelled():
                ticket.turn.exception()  # marks it as retrieved: nobody may be left to look
            self._pool.notify()

    async def close(self) -> None:
        """Stop granting room."""
        if self._granting is not None:
            self._granting.cancel()
            await asyncio.gather(self._granting, return_exceptions=True)

    def _check_places(self, waiting: Sequence[Ticket], *, num_choices: int) -> None:
        if not waiting:
            return
        if not self._pool.expects_any(Work.STREAM):
            raise NoReplicaError(role=self._pool.role, retry_after_s=self._settings.retry_after_s)
        num_waiting = len(waiting)
        if num_waiting > self._places.num_left(waiting[0].wish.demand.owner):
            who = f"{num_waiting} of {num_choices} choices" if num_choices > 1 else "the request"
            raise QueueFullError(
                f"too many requests waiting for KV memory: {who} would have to wait, {len(self._places)} do already, "
                f"and {self._places.limit_for(num_waiting)}; try again later",
                retry_after_s=self._settings.retry_after_s,
            )

    def _take_now(self, choices: Sequence[Ticket]) -> bool:
        """Reserve room for the choices of a prompt, as far as there is room; False if some got none."""
        first = choices[0]
        if not self._try(first) or first.reservation is None:
            return False
        for ticket in choices[1:]:
            ticket.reservation = self._try_beside(first.reservation.replica, ticket.wish)
            if ticket.reservation is None:
                return False
        return True

    def _try(self, ticket: Ticket) -> bool:
        """Give a ticket room, if there is any. The replica that computes its prompt counts it as queued from now on."""
        wish, pool = ticket.wish, self._pool
        placed = self._placement.place(wish.demand, num_blocks=wish.num_blocks)
        if placed is None:
            return False
        ticket.placed = placed
        own_tokens = placed.num_prompt_tokens if placed.is_colocated else 0
        if placed.num_head_tokens:
            own_tokens = wish.demand.num_tokens - placed.num_head_tokens
        ticket.reservation = pool.reserve(placed.stream, num_blocks=wish.num_blocks, num_tokens=own_tokens)
        if placed.prompt is not None and not placed.is_colocated:
            ticket.prompt_room = pool.reserve(
                placed.prompt,
                num_blocks=placed.num_prompt_blocks,
                num_tokens=placed.num_prompt_tokens,
                generates=False,
            )
        return True

    def _try_beside(self, replica: Replica, wish: RoomWish) -> Reservation | None:
        """Reserve room on the replica with the prompt's shared blocks, for the other blocks; None without room."""
        if not self._pool.is_usable(replica):
            return None
        if replica.num_available_blocks < wish.num_own_blocks and not replica.is_idle:
            return None
        return self._pool.reserve(replica, num_blocks=wish.num_own_blocks)

    def _stand_in_line(self, ticket: Ticket) -> None:
        ticket.turn = asyncio.get_running_loop().create_future()
        wish = ticket.wish
        self._places.add(ticket, owner=wish.demand.owner)
        ticket.place = self._queue.join(
            ticket, owner=wish.demand.owner, priority=wish.priority, order=ticket.order, cost=wish.num_blocks
        )
        if self._granting is None:
            self._granting = asyncio.create_task(self._grant())

    def _leave_line(self, ticket: Ticket) -> None:
        place, ticket.place = ticket.place, None
        if place is not None:
            self._queue.leave(place)

    async def _grant(self) -> None:
        try:
            while (place := self._queue.first()) is not None:
                first = place.item
                if first.turn is None or first.turn.done():
                    self._leave_line(first)
                elif self._try(first):
                    self._queue.serve(place)
                    first.place = None
                    self._places.discard(first)
                    first.turn.set_result(None)
                elif self._pool.has_any(work=Work.STREAM):
                    await self._pool.wait_for_change()
                else:
                    await self._recover()
        finally:
            self._granting = None

    async def _recover(self) -> None:
        """Wait for any replica at all; if none comes back in time, fail everyone who waits."""
        wait_s = self._settings.recovery_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while not self._pool.has_any(work=Work.STREAM):
                    await self._pool.wait_for_change()
        except TimeoutError:
            for ticket in self._queue:
                if ticket.turn is not None and not ticket.turn.done():
                    ticket.turn.set_exception(
                        NoReplicaError(
                            role=self._pool.role,
                            retry_after_s=self._settings.retry_after_s,
                            reason=f"none came back within {wait_s:g} s",
                        )
                    )
