"""Which prompts decode replicas compute themselves: mostly cached ones, and any while prefill is far behind."""

from __future__ import annotations

from router.pool.pool import ReplicaPool
from router.pool.replica import Replica, Reservation
from router.report.counters import RouterCounters
from router.request.generation import Generation
from router.settings import RouterSettings


class LocalPrompts:
    """Decides once for each request, when its decode replica is known."""

    def __init__(
        self, settings: RouterSettings, *, prefill_pool: ReplicaPool, decode_pool: ReplicaPool, counters: RouterCounters
    ) -> None:
        self._settings = settings
        self._prefill_pool = prefill_pool
        self._decode_pool = decode_pool
        self._counters = counters

    def takes(self, generation: Generation, reservation: Reservation) -> bool:
        """True if the decode replica should compute the part of the prompt that it has not cached."""
        if self._is_short(generation, reservation.replica):
            return True
        leader = generation.leader
        if leader is not None and not leader.is_local:  # the prefill replica has the blocks already
            return False
        if leader is not None and leader.decode_replica is reservation.replica:  # the blocks are on this replica
            generation.is_local = True
        elif (placed := generation.placed) is not None and placed.prompt is not None:
            generation.is_local = placed.is_colocated
            return generation.is_local
        elif self._is_prefill_behind(reservation.replica):
            generation.is_local = True
            # The next request must count this prompt before the replica's report does.
            reservation.add_tokens(len(generation.request.prompt_token_ids))
        # If any worker takes any work, this is the normal case, and it is counted by its placement reason instead.
        self._counters.num_local_prefills += generation.is_local and not self._settings.is_elastic
        return generation.is_local

    def _is_short(self, generation: Generation, replica: Replica) -> bool:
        limit = self._settings.local_prefill_tokens
        if not limit:
            return False
        num_tokens = len(generation.request.prompt_token_ids)
        if generation.request.sampling.num_prompt_logprobs is not None:
            return num_tokens <= limit
        return num_tokens - self._decode_pool.num_cached_tokens(replica, generation.demand) <= limit

    def _is_prefill_behind(self, replica: Replica) -> bool:
        """True if every prefill replica has more prompt tokens queued than this one, by the configured excess."""
        lead = self._settings.max_prefill_queue_lead
        fewest = self._prefill_pool.fewest_queued_tokens()
        return lead > 0 and fewest is not None and fewest - replica.queued_tokens > lead
