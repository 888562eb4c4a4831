"""The KV of a prompt was lost between prefill and decode: who computes it again, by the estimated wait it causes."""

from __future__ import annotations

from router.pool.pool import ReplicaPool
from router.pool.replica import Replica

HOP_S = 0.01
"""What another round over a prefill replica costs besides computing: two calls and the start of a read."""


class KVLostError(Exception):
    """The decode replica gave the request back: more of its KV is lost than it is to compute again."""


def recompute_limit(policy: str, *, prefill: ReplicaPool, decode: Replica, num_prompt_tokens: int) -> int | None:
    """So many lost tokens at most should the decode replica compute again; None means all of them.

    ``cheapest`` compares seconds waited, summed over everybody who waits: on the decode replica a prompt holds up the
    streams that run there; on a prefill replica it waits behind the prompts that are queued, and is read again.
    """
    if policy == "recompute":
        return None
    if policy in ("retry", "fail"):
        return 0
    candidates = [replica for replica in prefill.replicas if replica.takes_requests]
    rates = [rate for replica in candidates if (rate := tokens_per_s(replica))]
    if not rates:
        return None
    rate = sum(rates) / len(rates)
    num_ahead = min(replica.queued_tokens for replica in candidates)
    again_s = (num_ahead + num_prompt_tokens) / rate + transfer_s(decode) + HOP_S
    return max(int((again_s * rate - decode.queued_tokens) / (1 + decode.load.num_running)), 0)


def tokens_per_s(replica: Replica) -> float:
    """How fast a replica's steps were so far; 0 when it made none."""
    counters = replica.load.counters
    step_s = counters.get("step_s", 0.0)
    return counters.get("num_scheduled_tokens", 0.0) / step_s if step_s > 0.0 else 0.0


def transfer_s(replica: Replica) -> float:
    """How long a replica's reads took on average."""
    counters = replica.load.counters
    num_transfers = counters.get("num_transfers", 0.0)
    return counters.get("transfer_s", 0.0) / num_transfers if num_transfers else 0.0
