"""What injected faults do to one load of KV."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.connector import LoadOrder
from kv_transfer.fault_options import Fault
from kv_transfer.faults import FaultPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFault:
    """``failed_block_ids`` cannot be read, or are damaged; ``late_s`` is how much later the read ends; with
    ``ends_lease`` the source's lease ends before that.
    """

    failed_block_ids: tuple[int, ...] = ()
    late_s: float = 0.0
    ends_lease: bool = False
    error: str | None = None


NO_FAULT = LoadFault()


def draw_fault(plan: FaultPlan, order: LoadOrder) -> LoadFault:
    """What happens to a load. A failed read loses some of its blocks, a flipped bit one of them."""
    late_s = plan.late_s if plan.hits(Fault.READ_LATE) else 0.0
    ends_lease = plan.hits(Fault.LEASE_EXPIRED)
    block_ids = order.block_ids
    if block_ids and plan.hits(Fault.READ_FAILS):
        first = plan.choose(Fault.READ_FAILS, len(block_ids))
        return LoadFault(
            failed_block_ids=block_ids[first:], late_s=late_s, ends_lease=ends_lease, error="a read failed"
        )
    if block_ids and plan.hits(Fault.BIT_FLIPS):
        damaged = block_ids[plan.choose(Fault.BIT_FLIPS, len(block_ids))]
        return LoadFault(failed_block_ids=(damaged,), late_s=late_s, ends_lease=ends_lease, error="a block is damaged")
    return LoadFault(late_s=late_s, ends_lease=ends_lease)
