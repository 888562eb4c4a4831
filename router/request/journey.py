"""A request's path over decode replicas: where it was, why it left, and where its reusable KV is."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.contract.messages import TokenDelta
from kv_transfer.params import KVTransferParams
from router.balance.streams import MoveOrder
from router.errors import RouterError


@dataclass(slots=True, kw_only=True)
class Journey:
    """The decode replicas that a request has been on, and where its KV is.

    ``kv_transfer`` describes the KV of everything up to ``num_output_tokens``. ``kv_holder`` is the decode replica that
    keeps it, under a lease of the run ``kv_run_id``; None while the prefill replica does. ``reads_own_kv``: the request
    continues on the replica that kept its KV, so that nobody releases that lease. ``tried`` replicas are asked again
    only after all others. ``num_rebalanced`` is the number of orders to leave a replica; ``target`` is the replica that
    the last order named.
    """

    kv_transfer: KVTransferParams | None = None
    num_output_tokens: int = 0
    kv_lost_policy: str = "recompute"
    kv_holder: str | None = None
    kv_run_id: str = ""
    tried: set[str] = field(default_factory=set)
    num_losses: int = 0
    num_moves: int = 0
    num_full: int = 0
    num_rebalanced: int = 0
    target: str | None = None
    is_turned_away: bool = False
    reads_own_kv: bool = False
    reason: str = ""
    failure: RouterError | None = None

    @property
    def num_left(self) -> int:
        """How many replicas the request left, for any reason; replicas that refused it are included."""
        return self.num_losses + self.num_moves + self.num_full + self.num_rebalanced

    @property
    def is_first(self) -> bool:
        """True until the request leaves its first replica."""
        return self.num_left == 0

    @property
    def kv_policy(self) -> str:
        """What to do if the KV is lost; after a move, only the decode side can recompute it."""
        return self.kv_lost_policy if self.kv_holder is None else "recompute"

    @property
    def stage(self) -> str:
        """What the request is waiting for, for error messages."""
        if self.is_turned_away:
            return "decode, whose workers' queues are full"
        num_moves = self.num_losses + self.num_moves + self.num_rebalanced
        return f"decode, moved {num_moves} time{'s' if num_moves > 1 else ''}" if num_moves else "decode"

    def part(self, *, is_begun: bool, has_kv: bool) -> str:
        """The name, in a trace, of the time until the next replica's first token."""
        if not is_begun:
            return "prefill"
        if self.kv_holder is not None:
            return "move"
        return "transfer" if has_kv else "recompute"

    def usable_kv(self, num_output_tokens: int) -> KVTransferParams | None:
        """The KV that the next replica can read; None once tokens were generated that it does not cover."""
        return self.kv_transfer if num_output_tokens == self.num_output_tokens else None

    def lost(self, reason: str, *, failure: RouterError | None = None) -> None:
        """The replica failed, or refused; ``failure`` is the caller's error if no other replica is tried."""
        self.num_losses += 1
        self.reason = reason
        self.failure = failure
        self.is_turned_away = False

    def turned_away(self, reason: str) -> None:
        """The replica refused because its queue is full: nothing was lost, and the request waits."""
        self.num_full += 1
        self.reason = reason
        self.is_turned_away = True

    def handed_over(
        self, replica_id: str, final: TokenDelta, *, num_output_tokens: int, order: MoveOrder | None = None
    ) -> None:
        """The replica released the request, with its KV if there is any, because of a drain or of ``order``."""
        if order is None:
            self.num_moves += 1
        else:
            self.num_rebalanced += 1
            self.target = order.target
            self.tried = {replica_id}
        self.is_turned_away = False
        if final.kv_transfer is None or final.kv_transfer == self.kv_transfer:
            return
        self.kv_transfer = final.kv_transfer
        self.num_output_tokens = num_output_tokens
        self.kv_holder, self.kv_run_id = replica_id, final.request_id
