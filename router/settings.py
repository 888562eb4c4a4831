"""The router's settings: built once, checked when built, never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.role import Role
from router.policies import PREFIX, policy_names
from router.roles import ROLES, role_for
from router.scaling_rules import ScalingRules
from router.tools.reasoning import REASONING_FORMATS
from router.tools.registry import AUTO, NONE, TOOL_FORMATS

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

MetricsCompat = Literal["none", "vllm"]
RolesMode = Literal["fixed", "elastic"]

DEFAULT_ROLES: RolesMode = "elastic"

_AT_LEAST_ONE = (
    "max_body_bytes",
    "max_body_values",
    "max_num_requests",
    "max_num_choices",
    "max_prefill_attempts",
    "rebalance_max_in_flight",
)

_MAY_BE_NO_TIME = frozenset(
    {"recovery_wait_s", "max_write_delay_s", "backoff_max_s", "retry_after_s", "reading_wait_s", "rebalance_min_stay_s"}
)
"""Times that may be 0. Any other time of 0 would mean a busy loop, or a wait that nothing can ever end in time."""

LATE_PERIODS = 1.5
"""Number of report periods without a report after which a replica is asked; healthy replicas are a little late, too."""

_SILENCES = ("unresponsive_after_s", "stream_silence_timeout_s")

LossPolicy = Literal["retry", "recompute", "fail"]
KVLossPolicy = Literal["cheapest", "retry", "recompute", "fail"]
DecodeLossPolicy = Literal["retry", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The limits, timeouts and policies of a router, by subject.

    Request bodies:
    - ``max_body_bytes`` and ``max_body_values`` limit a body and its JSON values. The latter bounds how long validation
      occupies the event loop: about 0.1 s for half a million values.
    - ``read_timeout_s``: how long a body may take to arrive.
    - ``max_reading_bytes``: total size of the bodies over 64 KiB that are read, parsed or tokenized at the same time. A
      body that does not fit waits for at most ``reading_wait_s``.
    - ``default_max_tokens``: limit of a chat's answer if its body has none; None: the answer may fill the context.

    Waiting and time limits:
    - ``max_num_requests``: sequences in progress. ``max_num_queued``: those of them that wait for room on a decode
      replica. All choices of a body are counted on arrival; accepted ones wait until their deadline, even if all
      workers are full.
    - ``growth_headroom_tokens``: free KV beyond its prompt that a request must find on a decode replica.
    - ``recovery_wait_s``: how long an accepted request waits for a replica to come back after a failure, at most until
      its own deadline. It should be longer than the start of a new process (docs/faults.md).
    - ``write_timeout_s``: how long a client may leave an event unread before its request is cancelled.
    - ``min_read_bytes_per_s``: what a client that is behind must read, on average over five times as long; 0: any pace
      will do.
    - ``max_write_delay_s``: how long tokens may wait to be written together (router/wire/mailbox.py); 0: not at all.

    Lost replicas:
    - Replicas report every ``report_period_s``. One that neither reports nor answers for ``unresponsive_after_s``
      counts as lost; ``stream_silence_timeout_s`` is the same for its output stream alone. Time in which the router
      itself did not run does not count.
    - ``prefill_lost_policy``, ``kv_lost_policy`` and ``decode_lost_policy``: what happens to a request whose worker or
      KV is lost: another worker continues it, the decode worker recomputes the KV, whichever of the two is estimated to
      be cheaper, or it ends with an error.

    Placement:
    - ``roles``: with ``elastic`` any worker takes any work, and its role is only what it prefers. With ``fixed``
      prefill workers compute prompts, and decode workers generate.
    - ``local_prefill_tokens``: the decode replica computes a prompt itself if at most this many of its tokens are not
      cached there; 0: all prompts go to prefill replicas.
    - ``max_prefill_queue_lead``: it also computes any prompt while every prefill replica has more prompt tokens queued
      than the decode replica, by more than this; 0: never.
    - ``session_header``: requests with the same value of this header go to one replica, unless its KV usage exceeds the
      lowest by more than ``session_max_usage_lead``, or its queue by more than ``session_max_queue_lead`` tokens.
    - ``promise``: the latencies promised to requests that ask for none themselves.
    - ``hold_first_tokens``: if another worker continues, hold the first token back until the second one is there, as
      long as the promises for both allow it.

    Moving requests:
    - ``rebalance``: running streams leave a worker that is predicted to break their promised inter-token latency, or
      whose KV usage is at least ``rebalance_max_kv_usage``, for a worker with room. At most ``rebalance_max_in_flight``
      move at the same time, each at most ``rebalance_max_moves`` times, and only after ``rebalance_min_stay_tokens``
      tokens and ``rebalance_min_stay_s`` at a worker. For ``rebalance_cooldown_s`` after a move, both workers take part
      in no other.
    - ``move_waiting_prompts``: with elastic roles, waiting prompts move to workers that would complete them clearly
      sooner, within the limits ``rebalance_max_in_flight`` and ``rebalance_max_moves``.
    - ``adapt_leanings``: with elastic roles, one of the routers adapts the workers' leanings to the load, and every
      router divides the work while bursts of prompts come.
    - ``scaling``: the rules of pools that follow the promises; None: no pool does.

    What a router keeps:
    - ``max_stored_responses`` responses of /v1/responses, of at most ``max_stored_response_bytes`` together, for
      ``stored_response_ttl_s``; 0 responses: none.
    - Traces of a share ``trace_sample_rate`` of all requests: of those that run, and of the last ``trace_requests``
      that ended; 0 of either: none.

    Others:
    - ``admin_api``: the API accepts orders to workers. ``allows_faults``: workers accept orders to inject faults.
    - ``peer_period_s``: how often routers ask each other for their reports.
    - ``metrics_compat``: also export metrics under another system's names.
    - ``tool_format``, ``reasoning_format``: the model's formats of tool calls and of reasoning (docs/tools.md).
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_body_values: int = 500_000
    max_reading_bytes: int = 256 * 1024 * 1024
    reading_wait_s: float = 5.0
    max_num_requests: int = 2048
    max_num_queued: int = 1024
    max_num_choices: int = 128
    max_num_stop_strings: int = 16
    max_logprobs: int = 20
    default_timeout_s: float = 600.0
    max_timeout_s: float = 3600.0
    default_max_tokens: int | None = None
    admin_api: bool = True
    prefill_timeout_s: float = 300.0
    submit_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    stream_silence_timeout_s: float = 5.0
    unresponsive_after_s: float = 5.0
    max_prefill_attempts: int = 3
    migration_limit: int = 3
    prefill_lost_policy: LossPolicy = "retry"
    kv_lost_policy: KVLossPolicy = "cheapest"
    decode_lost_policy: DecodeLossPolicy = "retry"
    recovery_wait_s: float = 120.0
    growth_headroom_tokens: int = 64
    local_prefill_tokens: int = 0
    max_prefill_queue_lead: int = 0
    report_period_s: float = 0.5
    status_timeout_s: float = 2.0
    peer_period_s: float = 5.0
    abort_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    min_read_bytes_per_s: float = 240.0
    max_write_delay_s: float = 0.02
    backoff_min_s: float = 0.5
    backoff_max_s: float = 30.0
    retry_after_s: float = 1.0
    session_header: str | None = "X-Session-Id"
    session_max_usage_lead: float = 0.2
    session_max_queue_lead: int = 8192
    rebalance: bool = False
    rebalance_max_kv_usage: float = 0.9
    rebalance_max_in_flight: int = 8
    rebalance_max_moves: int = 3
    rebalance_min_stay_s: float = 2.0
    rebalance_min_stay_tokens: int = 16
    rebalance_cooldown_s: float = 2.0
    max_mirrored_blocks: int = 500_000
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 64 * 1024 * 1024
    stored_response_ttl_s: float = 3600.0
    trace_requests: int = 500
    trace_sample_rate: float = 1.0
    prefill_policy: str = ROLES["prefill"].policy
    decode_policy: str = ROLES["decode"].policy
    metrics_compat: MetricsCompat = "none"
    promise: Promise = NO_PROMISE
    move_waiting_prompts: bool = True
    hold_first_tokens: bool = True
    adapt_leanings: bool = True
    roles: RolesMode = DEFAULT_ROLES
    allows_faults: bool = False
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    scaling: ScalingRules | None = None

    def policy_of(self, role: Role) -> str:
        """The name of the policy that chooses among replicas of a role: the setting ``<role>_policy`` if there is one,
        otherwise the role's default.
        """
        policy: str = getattr(self, f"{role.name}_policy", role.policy)
        return policy

    def mirrors_cache(self, role: Role) -> bool:
        """True if routing for a role's work, or the choice of who computes a prompt, depends on prefix caches."""
        if self.is_elastic:
            return True
        policies = [self.policy_of(role_for(work)) for work in role.prefers]
        return PREFIX in policies or (role.decodes and self.local_prefill_tokens > 0)

    @property
    def most_choices(self) -> int:
        """How many choices a body may ask for. More than ``max_num_requests`` could never be in progress at once."""
        return min(self.max_num_choices, self.max_num_requests)

    @property
    def is_elastic(self) -> bool:
        """True when any worker takes any work."""
        return self.roles == "elastic"

    @property
    def stale_after_s(self) -> float:
        """Age at which a load report counts as stale: two reports in a row are missing."""
        return 2 * self.report_period_s

    def full_wait_s(self, num_refusals: int) -> float:
        """How long a request waits before it asks again, after ``num_refusals`` refusals by full queues."""
        longest_s = max(self.backoff_max_s, self.backoff_min_s)
        return min(self.backoff_min_s * 2.0 ** min(num_refusals - 1, 32), longest_s)

    @property
    def moves_waiting_prompts(self) -> bool:
        """True if waiting prompts may move to other workers."""
        return self.is_elastic and self.move_waiting_prompts

    @property
    def adapts_leanings(self) -> bool:
        """True if routers change workers' leanings."""
        return self.is_elastic and self.adapt_leanings

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"{item.name} must not be negative, got {value}")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_reading_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_reading_bytes ({self.max_reading_bytes}) is less than max_body_bytes ({self.max_body_bytes}): "
                "the largest bodies would never find room"
            )
        self._check_shares()
        self._check_times()
        self._check_names()
        if self.session_header is not None and not _HEADER_NAME.fullmatch(self.session_header):
            raise ValueError(f"session_header must be the name of a header, got {self.session_header!r}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ValueError(f"default_max_tokens must be at least 1, got {self.default_max_tokens}")
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(
                f"default_timeout_s ({self.default_timeout_s}) is larger than max_timeout_s ({self.max_timeout_s})"
            )

    def _check_shares(self) -> None:
        if self.trace_sample_rate > 1.0:
            raise ValueError(f"trace_sample_rate must be from 0 to 1, got {self.trace_sample_rate}")
        if not 0.2 <= self.rebalance_max_kv_usage <= 1.0:
            raise ValueError(f"rebalance_max_kv_usage must be from 0.2 to 1, got {self.rebalance_max_kv_usage}")

    def _check_names(self) -> None:
        for name, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            if (value := getattr(self, name)) not in (allowed := (AUTO, NONE, *known)):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        for role in ROLES.values():
            if (policy := self.policy_of(role)) not in policy_names():
                raise ValueError(f"{role.name}_policy must be one of {', '.join(policy_names())}, got {policy!r}")

    def _check_times(self) -> None:
        for item in fields(self):
            if item.name.endswith("_s") and item.name not in _MAY_BE_NO_TIME and getattr(self, item.name) == 0:
                raise ValueError(f"{item.name} must be more than 0 seconds, got {getattr(self, item.name)}")
        least_s = LATE_PERIODS * self.report_period_s
        for name in _SILENCES:
            if getattr(self, name) < least_s:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}: healthy workers, which report every report_period_s "
                    f"({self.report_period_s:g}), would count as lost; it must be at least {least_s:g}"
                )
