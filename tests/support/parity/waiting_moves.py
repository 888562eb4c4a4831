"""Orders to move waiting prompts, which a router gives by itself only if one worker is clearly behind."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from router.balance.streams import MoveOrder, MoveReason
from router.service import RouterService


def move_waiting(service: RouterService, request_ids: Collection[str]) -> list[asyncio.Task[None]]:
    """Order these requests' workers to let them go to another worker if they wait. Beam searches stay where they are.

    Returns:
        The orders that are under way: workers take note of one between two steps.
    """
    rebalancer, names = service.rebalancer, [replica.replica_id for replica in service.decode_pool.replicas]
    streams = [stream for stream in rebalancer._streams.all() if stream.is_waiting]
    orders: list[asyncio.Task[None]] = []
    for stream in streams:
        if stream.request.request_id in request_ids:
            target = next(name for name in names if name != stream.replica_id)
            stream.order = MoveOrder(target=target, reason=MoveReason.QUEUE, ordered_at_s=rebalancer._clock())
            orders.append(asyncio.create_task(rebalancer._tell(stream.replica_id, [stream])))
    return orders
