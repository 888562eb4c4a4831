"""The scenario language: a load, steps that cause or end faults, and checks for the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from cluster.chaos.fault_names import known_faults
from cluster.config.config_file import ConfigFileError, describe_problems, read_mapping
from cluster.config.config_section import Section
from cluster.config.names import ROUTER
from router.roles import ROLES

MEMBERS = (*ROLES, ROUTER)
"""What a scenario can break: the workers of a role, or the routers."""

Pick = Literal["busiest", "idlest", "random", "all"]

Total = Literal[
    "migrations",
    "drain_moves",
    "prefill_retries",
    "local_prefills",
    "failed_loads",
    "failed_blocks",
    "recomputed_tokens",
    "leases_expired",
]
"""The totals of /status that a run keeps track of."""

TOTALS: tuple[str, ...] = get_args(Total)

BROKEN = "broken_with_router"
"""Name of the count of requests that broke with a killed router or proxy; the load counts them."""

Mark = Literal[Total, "broken_with_router"]
"""The totals that grow when a fault strikes."""

MENDING = ("sleep", "wait_for_tokens", "resume", "heal", "wait_for_recovery")
"""Steps that cause no fault."""


class ScenarioError(Exception):
    """A scenario that cannot be run. The message is one line that says where and why."""


def _in_order(lengths: tuple[int, int]) -> tuple[int, int]:
    shortest, longest = lengths
    if shortest > longest:
        raise ValueError(f"the shortest is {shortest}, but the longest is {longest}: give the smaller number first")
    return lengths


Length = Annotated[int, Field(ge=1)]
Lengths = Annotated[tuple[Length, Length], AfterValidator(_in_order)]


class LoadSection(Section):
    """Requests that run all the time: each stream begins its next one when the last has ended."""

    streams: int = Field(default=16, ge=1, description="Number of concurrent streams.")
    distinct: int = Field(default=24, ge=1, description="Number of different requests, repeated in turn.")
    prompt_tokens: Lengths = Field(default=(20, 120), description="Shortest and longest prompt, in tokens.")
    output_tokens: Lengths = Field(default=(60, 160), description="Shortest and longest answer, in tokens.")
    pause_s: float = Field(default=0.0, ge=0, description="Seconds that a stream pauses between two requests.")
    seed: int = Field(default=1, description="The same seed gives the same requests.")


def _known(member: str) -> str:
    if member not in MEMBERS:
        raise ValueError(f"should be one of {', '.join(MEMBERS)}")
    return member


class Choice(Section):
    """One worker or router, or all of them. ``random`` is drawn from the scenario's seed."""

    role: Annotated[str, AfterValidator(_known)]
    choose: Pick = "busiest"
    node_ip: str | None = Field(default=None, description="Choose only on the node with this IP address.")
    min_running: int = Field(
        default=0, ge=0, description="Wait until the chosen workers together run at least this many requests."
    )


def _is_worker(choice: Choice | None) -> Choice | None:
    if choice is not None and choice.role not in ROLES:
        raise ValueError(f"only workers can be drained: role should be one of {', '.join(ROLES)}")
    return choice


class Pause(Choice):
    """A process that stands still, and goes on by itself after a while."""

    seconds: float = Field(default=30.0, gt=0)


class Command(Section):
    """A command of this machine that the load goes on beside: `baton deploy` with another configuration, say."""

    command: list[str] = Field(min_length=1, description="Program and arguments; run without a shell.")
    seconds: float = Field(default=300.0, gt=0, description="Time limit in seconds.")


class Step(Section):
    """Exactly one of these; ``expects`` may stand beside one that breaks something."""

    sleep: float | None = Field(default=None, ge=0, description="Seconds to let the load run.")
    wait_for_tokens: int | None = Field(
        default=None, ge=1, description="Wait until the streams got this many more tokens."
    )
    kill: Choice | None = Field(default=None, description="SIGKILL.")
    stop: Choice | None = Field(default=None, description="SIGSTOP, until `continue`.")
    resume: Literal["all"] | None = Field(
        default=None, alias="continue", description="Send SIGCONT to all stopped processes."
    )
    pause: Pause | None = Field(default=None, description="SIGSTOP, then SIGCONT after `seconds`.")
    drain: Annotated[Choice | None, AfterValidator(_is_worker)] = Field(
        default=None, description="Drain it, as `baton drain` does."
    )
    replace: float | None = Field(
        default=None,
        gt=0,
        description="Drain every worker, one after the other, with this time limit in seconds for each.",
    )
    kill_node: Choice | None = Field(default=None, description="SIGKILL the raylet of the node that a worker is on.")
    kill_proxy: float | None = Field(
        default=None,
        gt=0,
        description="SIGKILL the process that listens on the API's port, and allow this many seconds until it is back.",
    )
    run: Command | None = Field(default=None, description="Run a command, and wait until it succeeds.")
    faults: Annotated[dict[str, float], AfterValidator(known_faults)] | None = Field(
        default=None, description="Faults to inject into all connectors from now on."
    )
    partition: Literal["workers"] | None = Field(
        default=None, description="Workers cannot reach each other until `heal`."
    )
    heal: Literal["all"] | None = Field(default=None, description="End all faults of connectors.")
    wait_for_recovery: float | None = Field(
        default=None, gt=0, description="Wait until the cluster has recovered, for at most this many seconds."
    )

    expects: list[Mark] = Field(
        default=[], min_length=1, description="Counters of which at least one must grow when the fault strikes."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        actions = sorted(key_of(name) for name in self.model_fields_set - {"expects"})
        if len(actions) != 1:
            raise ValueError(f"a step must have exactly one action, but this one has {', '.join(actions) or 'none'}")
        if getattr(self, self.name) is None:
            raise ValueError(f"{actions[0]} needs a value")
        if self.expects and self.name in MENDING:
            raise ValueError(f"{actions[0]} is not a fault and cannot have expects: leave it out")
        return self

    @property
    def name(self) -> str:
        """The name of the action."""
        return next(iter(self.model_fields_set - {"expects"}))

    @property
    def needs_faults(self) -> bool:
        """True for a step that connectors refuse unless the cluster allows faults."""
        return self.faults is not None or self.partition is not None


def key_of(name: str) -> str:
    """The key of a step's action, as written in the file."""
    return Step.model_fields[name].alias or name


class ChecksSection(Section):
    """What must be true when the load has ended."""

    lost: int = Field(default=0, ge=0, description="Requests that may end with an error.")
    lost_with_router: bool = Field(
        default=True, description="Requests that were open at a killed router or proxy may break in addition."
    )
    wrong: int = Field(default=0, ge=0, description="Answers that may differ from the undisturbed run.")
    leaks: bool = Field(default=False, description="Whether blocks may stay held.")
    recomputed: bool = Field(
        default=True, description="Whether KV may be computed again (which a drain does not need)."
    )
    struck: bool = Field(
        default=False,
        description="Whether each fault must make an expected counter grow; otherwise it is a warning if none does.",
    )
    max_pause_s: float | None = Field(
        default=None, gt=0, description="Longest silence that a stream may have, in seconds."
    )
    rest_timeout_s: float = Field(default=60.0, gt=0, description="Seconds within which blocks must become free.")


class Scenario(Section):
    """One run."""

    name: str = Field(min_length=1)
    seed: int = 0
    repeat: int = Field(default=1, ge=1, description="How many times the steps are repeated.")
    load: LoadSection = Field(default_factory=LoadSection)
    steps: list[Step] = Field(min_length=1)
    checks: ChecksSection = Field(default_factory=ChecksSection)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ScenarioError: The file is missing, or is not a scenario.
    """
    try:
        content = read_mapping(path, Scenario, kind="scenario")
    except ConfigFileError as error:
        raise ScenarioError(str(error)) from error
    return parse_scenario(content, where=str(path))


def parse_scenario(content: Any, *, where: str) -> Scenario:
    """Check a scenario.

    Raises:
        ScenarioError: The content is invalid; the message names all mistakes.
    """
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        raise ScenarioError("; ".join(describe_problems(error, where=where, flags={}, schema=Scenario))) from error
