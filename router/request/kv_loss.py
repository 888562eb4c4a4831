"""Decides who recomputes a prompt whose KV was lost between prefill and decode, by the estimated waiting time."""

from __future__ import annotations

from engine.contract.role import Work
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica

HOP_S = 0.01
"""Overhead of another prefill round besides computing, in seconds: two calls and the start of a read."""


class KVLostError(Exception):
    """The decode replica gave the request back: more of its KV is lost than that replica may recompute."""


def recompute_limit(policy: str, *, prefill: ReplicaPool, decode: Replica, num_prompt_tokens: int) -> int | None:
    """How many lost tokens the decode replica should recompute at most; None means any number.

    ``cheapest`` compares the waiting seconds, summed over all requests that wait. On the decode replica a prompt delays
    the running streams. On a prefill replica it waits behind the queued prompts, and its KV is transferred again.
    """
    if policy == "recompute":
        return None
    if policy in ("retry", "fail"):
        return 0
    candidates = [replica for replica in prefill.that_take(Work.PROMPT) if replica.takes_requests]
    rates = [rate for replica in candidates if (rate := tokens_per_s(replica))]
    if not rates:
        return None
    rate = sum(rates) / len(rates)
    num_ahead = min(replica.queued_tokens for replica in candidates)
    again_s = (num_ahead + num_prompt_tokens) / rate + transfer_s(decode) + HOP_S
    return max(int((again_s * rate - decode.queued_tokens) / (1 + decode.load.num_running)), 0)


def tokens_per_s(replica: Replica) -> float:
    """A replica's average throughput in its steps so far; 0 if it made none."""
    counters = replica.load.counters
    step_s = counters.get("step_s", 0.0)
    return counters.get("num_scheduled_tokens", 0.0) / step_s if step_s > 0.0 else 0.0


def transfer_s(replica: Replica) -> float:
    """Average duration of a replica's KV transfers so far."""
    counters = replica.load.counters
    num_transfers = counters.get("num_transfers", 0.0)
    return counters.get("transfer_s", 0.0) / num_transfers if num_transfers else 0.0
