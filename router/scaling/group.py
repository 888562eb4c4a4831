"""Workers that are sized together: those of one pool, or of all pools if any worker takes any work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract.promise import Promise
from engine.contract.role import Role, Work
from engine.contract.step_time import StepTimeModel
from router.placement.prediction import NEVER
from router.placement.prompt_share import num_prompt_tokens
from router.pool.replica import KNOWN_PROMPT_TOKENS, Replica
from router.report.arrivals import ArrivalSample
from router.roles import ROLES, groups_of_roles
from router.scaling.demand import Demand, demand_of
from router.scaling.policy import Need, ScalingPolicy
from router.scaling.prediction import Predictor
from router.scaling.sizing import Sizing, fewest_workers, workers_for_streams, workers_to_catch_up
from router.scaling_rules import PoolBounds, ScalingRules
from router.settings import RouterSettings

MIN_STREAM_TOKENS = 64
"""A worker that has generated fewer tokens gives no prices of streams."""

MANY_PROMPT_TOKENS = 8192.0
MANY_STREAM_TOKENS = 1024.0
"""The prices of a worker that has computed fewer tokens may still be far off, and count less than others'."""

_PROMPT_PRICES = ("prompt_token_s", "prompt_read_s")
_STREAM_PRICES = ("base_s", "row_s", "context_token_s")

SPARE = 1.25
"""Workers are sized for this many times the forecast load."""

CHANCE = 3.0
"""Before a worker is drained, fewer must suffice even for this many standard deviations more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The workers of one pool, or of all pools if any worker takes any work."""

    replicas: Sequence[Replica]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait at the workers or are on their way."""
        return sum(replica.queued_tokens for replica in self.replicas)

    @property
    def num_streams(self) -> int:
        """Streams that are decoding, or are about to."""
        return sum(
            replica.load.num_decoding + replica.load.num_loading + replica.num_reserved_rows
            for replica in self.replicas
        )

    def predictor(self, *, prompts: bool, streams: bool) -> Predictor | None:
        """A predictor for workers like these; None until enough is known of the work that they should do."""
        models = [replica for replica in self.replicas if replica.load.step_time.num_steps > 0]
        with_prompts = {
            item: known for item in models if (known := num_prompt_tokens(item.load)) >= KNOWN_PROMPT_TOKENS
        }
        with_streams = {item: known for item in models if (known := _num_generated(item)) >= MIN_STREAM_TOKENS}
        if (prompts and not with_prompts) or (streams and not with_streams):
            return None
        alike = dict.fromkeys(models, 1.0)
        prices = {name: _mean(with_prompts or alike, name, most=MANY_PROMPT_TOKENS) for name in _PROMPT_PRICES}
        prices |= {name: _mean(with_streams or alike, name, most=MANY_STREAM_TOKENS) for name in _STREAM_PRICES}
        tokens = [item.load.num_blocks * item.info.block_size for item in models if item.info is not None]
        return Predictor(
            step_time=StepTimeModel(**prices, error=0.0, num_steps=1),
            num_kv_tokens=min(tokens, default=0),
        )


def _num_generated(replica: Replica) -> float:
    return replica.load.counters.get("num_generated_tokens", 0.0)


def _mean(known: Mapping[Replica, float], name: str, *, most: float) -> float:
    """A price's mean over workers; each counts as much as it has computed tokens, up to ``most``."""
    weights = {replica: min(number, most) for replica, number in known.items()}
    total = sum(weights.values())
    values = [weight * getattr(item.load.step_time.on(1.0), name) for item, weight in weights.items()]
    return sum(values) / total if total else 0.0


def spare_below(demand: Demand) -> float:
    """Factor on the load for which fewer workers must suffice before any is drained: small loads vary more."""
    return SPARE + CHANCE / math.sqrt(max(len(demand.prompts), 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known at one moment: the routers' recent arrivals, and the workers by the roles of their pools."""

    now_s: float
    horizon_s: float
    samples: Sequence[ArrivalSample]
    typical_output: float
    replicas: Mapping[str, Sequence[Replica]]


@dataclass(slots=True, kw_only=True)
class Group:
    """The ``wanted`` workers of each role, within the bounds of the rules; a role without bounds keeps its number.

    The workers compute prompts with more than ``over_tokens`` and at most ``up_to_tokens`` uncached tokens, and decode
    if ``has_streams``.
    """

    rules: ScalingRules
    promise: Promise
    wanted: dict[str, int]
    has_streams: bool
    over_tokens: float = 0.0
    up_to_tokens: float = float("inf")
    _policy: ScalingPolicy = field(init=False)

    def __post_init__(self) -> None:
        self._policy = ScalingPolicy(hold_s=self.rules.hold_s, wanted=sum(self.wanted.values()))

    def adopt(self, role: str, number: int) -> None:
        """Take a role's current number of workers as the wanted one."""
        self.wanted = {**self.wanted, role: number}
        self._policy.wanted = sum(self.wanted.values())

    def look(self, look: Look) -> str:
        """Adjust ``wanted`` to the load.

        Returns:
            Why it changed; empty if it did not.
        """
        state = PoolState(
            replicas=[item for role in self.wanted for item in look.replicas[role] if item.takes_requests]
        )
        demand = self._demand(look)
        predictor = state.predictor(prompts=bool(demand.prompts), streams=self.has_streams)
        before = self._policy.wanted
        if predictor is None:
            if demand.prompts or state.num_streams or state.num_queued_tokens:
                return ""
            least, _ = self._range()
            wanted = self._policy.look(Need(now=least, with_margin=least), look.now_s)
            self._divide(wanted, 0.5)
            return _nothing_came(self.rules)
        sizing, need = self._size(predictor, demand, state, look)
        wanted = self._policy.look(need, look.now_s)
        self._divide(wanted, predictor.prompt_share(demand))
        if wanted > before:
            return _why_up(demand, sizing, need, look)
        return _why_down(predictor, demand, wanted, self.rules) if wanted < before else ""

    def _demand(self, look: Look) -> Demand:
        demand = demand_of(
            look.samples, typical_output=look.typical_output, horizon_s=look.horizon_s, promise=self.promise
        )
        if not self.has_streams:
            demand = demand.without_streams()
        own = [item for item in demand.prompts if self.over_tokens < item.num_new_tokens <= self.up_to_tokens]
        return demand.only(own)

    def _size(self, predictor: Predictor, demand: Demand, state: PoolState, look: Look) -> tuple[Sizing, Need]:
        least, most = self._range()
        target = self.rules.target
        sizing = fewest_workers(predictor, demand.times(SPARE), target=target, least=least, most=most)
        spare = fewest_workers(predictor, demand.times(spare_below(demand)), target=target, least=least, most=most)
        num_now = max(len(state.replicas), 1)
        urgent = [workers_for_streams(predictor, demand, state.num_streams)] if self.has_streams else []
        if (promise_s := demand.mean_ttft_s) < NEVER:
            urgent.append(
                workers_to_catch_up(
                    queued_s=predictor.queued_seconds(state.num_queued_tokens, demand),
                    num_workers=num_now,
                    busy_workers=predictor.predict(demand, num_now).busy * num_now,
                    promise_s=promise_s,
                    start_s=look.horizon_s,
                )
            )
        now = min(max(sizing.num_workers, *urgent, 0), most)
        return sizing, Need(now=now, with_margin=spare.num_workers)

    def _bounds(self, role: str) -> PoolBounds:
        """The bounds of a role's number of workers."""
        number = self.wanted[role]
        return self.rules.pools.get(role, PoolBounds(least=number, most=number))

    def _range(self) -> tuple[int, int]:
        """The bounds of the number of workers of all roles."""
        bounds = [self._bounds(role) for role in self.wanted]
        return sum(item.least for item in bounds), sum(item.most for item in bounds)

    def _divide(self, wanted: int, prompt_share: float) -> None:
        """Add workers to the roles that lack most, or remove them from those with most to spare; keep all else."""
        least, most = self._range()
        self._policy.wanted = wanted = min(max(wanted, least), most)
        shares = _shares([ROLES[role] for role in self.wanted], prompt_share)
        while (total := sum(self.wanted.values())) != wanted:
            step = 1 if wanted > total else -1
            free = [
                role for role in self.wanted if self._bounds(role).clamp(self.wanted[role] + step) != self.wanted[role]
            ]
            role = max(free, key=lambda role: step * (shares[role] * wanted - self.wanted[role]))
            self.wanted[role] += step


def groups_of(settings: RouterSettings, sizes: Mapping[str, int]) -> Sequence[Group]:
    """The groups in which some pool follows the promises, starting with these sizes."""
    rules = settings.scaling
    assert rules is not None, "there are groups only where pools follow the promises"
    found = []
    for roles in groups_of_roles(sizes, is_elastic=settings.is_elastic):
        works = {work for role in roles for work in (Work if settings.is_elastic else role.prefers)}
        local = float(settings.local_prefill_tokens)
        group = Group(
            rules=rules,
            promise=settings.promise,
            wanted={role.name: sizes[role.name] for role in roles},
            has_streams=Work.STREAM in works,
            over_tokens=0.0 if Work.STREAM in works else local,
            up_to_tokens=float("inf") if Work.PROMPT in works else local,
        )
        if group.wanted.keys() & rules.pools.keys():
            found.append(group)
    return found


def _shares(roles: Sequence[Role], prompt_share: float) -> dict[str, float]:
    """Each role's share of a load: the roles for one kind of work have the same shares of it."""
    of_work = {Work.PROMPT: prompt_share, Work.STREAM: 1.0 - prompt_share}
    if len(works := {work for role in roles for work in role.prefers}) == 1:
        of_work = dict.fromkeys(works, 1.0)
    num_for = Counter(work for role in roles for work in role.prefers)
    return {role.name: sum(of_work[work] / num_for[work] for work in role.prefers) for role in roles}


def _why_up(demand: Demand, sizing: Sizing, need: Need, look: Look) -> str:
    load = f"{demand.rate:.3g} requests/s are expected in {look.horizon_s:.0f} s"
    if need.now > sizing.num_workers:
        return f"{load}, and the requests that wait already need {_workers(need.now)} to catch up"
    told = f"{load}: with {_workers(sizing.num_workers)} {sizing.predicted.attainment:.1%} of them meet their promise"
    fewer = sizing.with_fewer
    return told if fewer is None else f"{told}, with one fewer {fewer.attainment:.1%}"


def _why_down(predictor: Predictor, demand: Demand, wanted: int, rules: ScalingRules) -> str:
    if not demand.prompts:
        return _nothing_came(rules)
    spare = spare_below(demand)
    kept = predictor.predict(demand.times(spare), wanted).attainment
    return (
        f"for {rules.hold_s:.0f} s {_workers(wanted)} would have been enough, even for {spare - 1:.0%} more than the "
        f"{demand.rate:.3g} requests/s that came: {kept:.1%} would have met their promise"
    )


def _nothing_came(rules: ScalingRules) -> str:
    return f"no requests came for {rules.hold_s:.0f} s"


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"
