"""Places requests in a pool whose workers take any work: by predictions, or by policies until there are any."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from engine.contract.messages import LoadReport
from engine.contract.role import Work
from router.placement.fleet import Column, Standings
from router.placement.planner import Plan, are_any_known, choose, choose_prompt, prepare, weigh
from router.placement.prediction import Wish, promised_seconds
from router.placement.reason import Reason
from router.pool.demand import Demand
from router.pool.placing import NamedPlan, Placed
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica
from router.roles import ROLES
from router.settings import RouterSettings

HOP_S = 0.01
"""Overhead of a hand-over besides moving bytes, in seconds: two calls and the start of a read."""

BYTES_PER_S = 1e9
"""Assumed speed of KV transfers until one was measured."""

MAX_WEIGHED = 4
"""How many plans besides the chosen one are recorded for a traced request."""

LEAST_HEAD_BLOCKS = 4
"""Number of cached blocks from which handing them over to a worker that computes the rest is worth it."""


class ElasticPlacement:
    """Places each request as a whole: who computes its prompt, and who generates."""

    def __init__(self, pool: ReplicaPool, *, settings: RouterSettings, num_new_tokens: Callable[[], float]) -> None:
        """``num_new_tokens`` estimates how many tokens a request without a limit will generate."""
        self._pool = pool
        self._settings = settings
        self._num_new_tokens = num_new_tokens
        self._places: tuple[Sequence[Replica], Mapping[str, int]] = ((), {})
        self._names_policy = any(settings.policy_of(role) != role.policy for role in ROLES.values())

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """Place a request that needs ``num_blocks``; None while no replica has room.

        The worker of its session generates, unless it is overloaded. Policies that the settings name take precedence
        over predictions, and so do all policies while nothing can be predicted.
        """
        candidates = self._pool.candidates()
        if self._names_policy or not candidates:
            return self._by_policies(demand, num_blocks, Reason.OVERRIDE)
        fleet = self._pool.standings(self._everyone(candidates))
        if not are_any_known(fleet, len(candidates)):
            return self._by_policies(demand, num_blocks, Reason.MODELS_UNKNOWN)
        home = self._home(demand, candidates, num_blocks)
        if home is not None:
            for at, item in enumerate(candidates):
                fleet.num_available_blocks[at] = math.inf if item is home else -math.inf
                fleet.is_idle[at] = 0.0
        cached, wish = self._cached_tokens(demand, candidates, fleet), self._wish(demand, num_blocks, candidates)
        prepare(fleet, num_context_tokens=demand.num_tokens)
        plan = choose(fleet, wish, cached)
        if plan is None:
            return None
        num_computed = plan.num_head_tokens or demand.num_tokens
        lacking = max(num_computed - int(cached[plan.prompt]), 1)
        placed = self._placed(candidates, plan, lacking, has_home=home is not None)
        if not demand.is_traced:
            return placed
        return replace(placed, weighed=_named(fleet, wish, cached, plan, candidates))

    def place_prompt(self, demand: Demand) -> Placed | None:
        """Place a request without decode; None leaves it to the policy."""
        candidates = self._pool.candidates()
        if self._names_policy or not candidates:
            return None
        fleet = self._pool.standings(self._everyone(candidates))
        if not are_any_known(fleet, len(candidates)):
            return None
        cached, wish = self._cached_tokens(demand, candidates, fleet), self._wish(demand, 0, candidates)
        prepare(fleet, num_context_tokens=0.0)
        at = choose_prompt(fleet, wish, cached)
        replica, lacking = candidates[at], max(demand.num_tokens - int(cached[at]), 1)
        return Placed(stream=replica, prompt=replica, num_prompt_tokens=lacking, reason=Reason.COLOCATED)

    def _everyone(self, candidates: Sequence[Replica]) -> Sequence[Replica]:
        """The candidates, then all other replicas that may compute on their hosts, including draining ones."""
        everyone = self._pool.replicas
        if len(candidates) == len(everyone):
            return candidates
        chosen = {item.replica_id for item in candidates}
        return [*candidates, *(item for item in everyone if item.replica_id not in chosen)]

    def _home(self, demand: Demand, candidates: Sequence[Replica], num_blocks: int) -> Replica | None:
        """The worker of the request's session, among those that lean to streams, if it has room."""
        if demand.session_id is None:
            return None
        homes = [item for item in candidates if item.prefers(Work.STREAM)] or candidates
        home = self._pool.home(demand, homes)
        has_room = home is not None and (home.num_available_blocks >= num_blocks or home.is_idle)
        return home if has_room else None

    def _placed(self, candidates: Sequence[Replica], plan: Plan, num_prompt_tokens: int, *, has_home: bool) -> Placed:
        prompt, stream = candidates[plan.prompt], candidates[plan.stream]
        if has_home:
            reason = Reason.SESSION
        elif plan.num_head_tokens:
            reason = Reason.SPLIT
        elif plan.is_colocated:
            reason = Reason.COLOCATED
        elif not stream.prefers(Work.STREAM):
            reason = Reason.OVERFLOW_TO_PREFILL
        else:
            reason = Reason.APART if prompt.prefers(Work.PROMPT) else Reason.OVERFLOW_TO_DECODE
        return Placed(
            stream=stream,
            prompt=prompt,
            num_prompt_tokens=num_prompt_tokens,
            num_head_tokens=plan.num_head_tokens,
            reason=reason,
        )

    def _by_policies(self, demand: Demand, num_blocks: int, reason: Reason) -> Placed | None:
        """Choose by the policies for streams and prompts, each among the workers that lean to it if possible.

        The prompt gets a reservation as well. Otherwise two workers could deadlock: each keeps a computed prompt for
        the other one, and has no room for what the other one keeps.
        """
        pool, num_prompt_blocks = self._pool, self._pool.blocks_for(demand.num_tokens + 1)
        stream = pool.choose(demand, work=Work.STREAM, num_blocks=num_blocks, must_fit=True)
        if stream is None:
            return None
        others = (stream.replica_id,)
        prompt = pool.choose(demand, work=Work.PROMPT, num_blocks=num_prompt_blocks, exclude=others, must_fit=True)
        if prompt is None or prompt not in pool.candidates():  # no other replica, or one without fresh reports
            prompt = stream
        lead = self._settings.max_prefill_queue_lead
        if lead > 0 and prompt.queued_tokens - stream.queued_tokens > lead:
            prompt, reason = stream, Reason.OVERRIDE
        lacking = max(demand.num_tokens - pool.num_cached_tokens(prompt, demand), 1)
        return Placed(
            stream=stream,
            prompt=prompt,
            num_prompt_tokens=lacking,
            num_prompt_blocks=num_prompt_blocks,
            reason=reason,
        )

    def _wish(self, demand: Demand, num_blocks: int, candidates: Sequence[Replica]) -> Wish:
        info = candidates[0].info
        block_size = info.block_size if info is not None else 0
        return Wish(
            num_prompt_tokens=float(demand.num_tokens),
            num_new_tokens=float(min(demand.max_tokens - 1.0, self._num_new_tokens())),
            least_head_tokens=float(LEAST_HEAD_BLOCKS * block_size if demand.may_be_split else 0),
            num_blocks=float(num_blocks),
            num_prompt_blocks=float(self._pool.blocks_for(demand.num_tokens + 1)),
            ttft_s=promised_seconds(demand.promise.ttft_ms),
            itl_s=promised_seconds(demand.promise.itl_ms),
            hand_over_s=float(_hand_over_s(candidates[0], demand.num_tokens)),
            key=float(demand.key),
        )

    def _cached_tokens(self, demand: Demand, candidates: Sequence[Replica], fleet: Standings) -> Column:
        """Cached tokens of the prompt at each candidate, as a column of the same kind as those of ``fleet``."""
        cached: Any = [0.0] * len(candidates) if isinstance(fleet.host, list) else np.zeros(len(candidates))
        counts = self._pool.cached_tokens(demand)
        if not counts:
            return cast("Column", cached)
        if self._places[0] is not candidates:
            self._places = (candidates, {item.replica_id: place for place, item in enumerate(candidates)})
        find = self._places[1].get
        for replica_id, num_tokens in counts.items():
            if (place := find(replica_id)) is not None:
                cached[place] = float(num_tokens)
        return cast("Column", cached)


def _named(
    fleet: Standings, wish: Wish, cached: Column, chosen: Plan, candidates: Sequence[Replica]
) -> list[NamedPlan]:
    """The cheapest plans, the chosen one first."""
    return [
        NamedPlan(
            prompt=candidates[plan.prompt].replica_id,
            stream=candidates[plan.stream].replica_id,
            ttft_s=ttft_s,
            cost=plan.cost,
            num_head_tokens=plan.num_head_tokens,
        )
        for plan, ttft_s in weigh(fleet, wish, cached, chosen, limit=MAX_WEIGHED)
    ]


def _hand_over_s(replica: Replica, num_tokens: int) -> float:
    """Time to move a prompt's KV, at this replica's average read speed so far."""
    info = replica.info
    if info is None:
        return HOP_S
    return HOP_S + num_tokens * info.block_bytes / info.block_size / _bytes_per_s(replica.load)


def _bytes_per_s(load: LoadReport) -> float:
    num_bytes, seconds = load.counters.get("num_bytes", 0.0), load.counters.get("transfer_s", 0.0)
    return num_bytes / seconds if num_bytes > 0.0 and seconds > 0.0 else BYTES_PER_S
