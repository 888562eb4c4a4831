"""The report of a scenario: the faults, their effects, and the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.chaos.load import Answer, ChaosRequest
from cluster.chaos.scenario import BROKEN

NOTICE_S = 5.0
"""How long Serve's proxies may still choose a router that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """Routers that were killed. At ``asked_s``, just before, they had ``num_open`` requests. Their processes ended at
    ``gone_s``, a moment after the kill: a router outlives the raylet of its node for a moment."""

    asked_s: float
    gone_s: float
    num_open: int

    def excused(self, answers: Sequence[Answer]) -> int:
        """How many broken answers these routers explain: at most their open requests, plus requests that may have been
        on their way to them. Later requests do not count, nor do errors of Baton, which only live routers send."""
        was_open = [answer for answer in answers if self._may_have_had(answer)]
        num_broken = sum(answer.broken_by is not None for answer in was_open)
        num_unheard = sum(not any(time_s <= self.asked_s for time_s in answer.event_times_s) for answer in was_open)
        return min(num_broken, self.num_open + num_unheard)

    def _may_have_had(self, answer: Answer) -> bool:
        """True for requests that were open when the routers ended, and for those that proxies sent them even later."""
        until_s = self.gone_s + (NOTICE_S if answer.broken_by == "proxy" else 0.0)
        return answer.started_s <= until_s and answer.ended_s >= self.asked_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLoss:
    """Proxies that were killed at ``asked_s`` or a moment later. By ``back_s`` they were replaced."""

    asked_s: float
    back_s: float

    def excused(self, answers: Sequence[Answer]) -> int:
        """How many broken answers they explain: all that were open, since every connection went through them."""
        return sum(
            answer.broken_by is not None and answer.started_s <= self.back_s and answer.ended_s >= self.asked_s
            for answer in answers
        )


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """One step that broke something. ``whole_s`` is when the cluster was seen whole again; None before that.

    ``expects`` names the totals that grow when the fault strikes. ``before`` are the totals when the step began, and
    ``grew`` is by how much the expected ones have grown since.
    """

    what: str
    began_s: float
    ended_s: float | None = None
    whole_s: float | None = None
    longest_pause_s: float = 0.0
    expects: tuple[str, ...] = ()
    before: dict[str, float] = field(default_factory=dict)
    grew: dict[str, float] = field(default_factory=dict)
    losses: list[RouterLoss | ProxyLoss] = field(default_factory=list)

    @property
    def is_missed(self) -> bool:
        """True when none of the expected totals grew, so the fault did not strike."""
        return bool(self.expects) and not any(self.grew.values())

    @property
    def miss(self) -> str:
        """The message about a fault that did not strike, with a remedy."""
        remedy = "a larger load" if self.expects == (BROKEN,) else "roles: fixed or a larger load"
        return f"{self.what}: {' and '.join(self.expects)} did not grow; use {remedy}"

    def line(self) -> str:
        """The record as one readable line."""
        whole = "not seen to recover" if self.whole_s is None else f"recovered after {self.whole_s:.1f} s"
        told = f"{self.what}: longest pause of a stream {self.longest_pause_s:.2f} s, {whole}"
        if not self.expects:
            return told
        grew = ", ".join(f"{name} {value:g}" for name, value in self.grew.items())
        return f"{told}; {'did not strike as expected' if self.is_missed else 'struck'} ({grew})"


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """The outcome of one scenario; times are seconds. ``problems`` is empty when all checks hold. ``warnings`` is empty
    when, as far as is known, every fault struck."""

    scenario: str
    num_requests: int = 0
    num_tokens: int = 0
    num_refusals: int = 0
    num_lost: int = 0
    num_broken_with_router: int = 0
    num_wrong: int = 0
    duration_s: float = 0.0
    longest_pause_s: float = 0.0
    faults: list[FaultRecord] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, list[int]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def judge_answers(
        self,
        answers: Sequence[Answer],
        undisturbed: Mapping[ChaosRequest, list[int]],
        *,
        losses: Sequence[RouterLoss | ProxyLoss],
    ) -> None:
        """Count lost and wrong answers, and the longest pause of the streams around each fault."""
        self.num_requests = len(answers)
        failed = [answer for answer in answers if answer.error]
        num_broken = sum(answer.broken_by is not None for answer in failed)
        self.num_broken_with_router = min(num_broken, sum(loss.excused(answers) for loss in losses))
        self.num_lost = len(failed) - self.num_broken_with_router
        self.errors = [answer.error for answer in failed][:20]
        for answer in answers:
            self.num_tokens += len(answer.tokens)
            self.num_refusals += answer.num_refusals
            expected = undisturbed[answer.ask]
            self.num_wrong += answer.tokens != (expected[: len(answer.tokens)] if answer.error else expected)
        for number, fault in enumerate(self.faults):
            until_s = self.faults[number + 1].began_s if number + 1 < len(self.faults) else float("inf")
            pauses = (answer.longest_pause_s(fault.began_s, until_s) for answer in answers)
            fault.longest_pause_s = max(pauses, default=0.0)
        self.longest_pause_s = max((fault.longest_pause_s for fault in self.faults), default=0.0)

    def judge_strikes(self, answers: Sequence[Answer], *, must_strike: bool) -> None:
        """Check whether each fault struck: its expected totals grew before the next fault that expects the same ones.

        A fault that did not strike is a problem with ``must_strike``, and otherwise a warning.
        """
        for number, fault in enumerate(self.faults):
            for name in fault.expects:
                if name == BROKEN:
                    fault.grew[name] = sum(loss.excused(answers) for loss in fault.losses)
                    continue
                later = (other.before[name] for other in self.faults[number + 1 :] if name in other.expects)
                fault.grew[name] = max(next(later, self.counted[name]) - fault.before[name], 0.0)
        missed = [fault.miss for fault in self.faults if fault.is_missed]
        words = "no fault struck" if self._all_missed else "a fault did not strike"
        (self.problems if must_strike else self.warnings).extend(f"{words} as expected: {told}" for told in missed)

    @property
    def _all_missed(self) -> bool:
        return all(fault.is_missed for fault in self.faults if fault.expects)

    def as_json(self) -> dict[str, Any]:
        """The report as values for a JSON file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as readable lines."""
        told = [f"{self.scenario}: {self.num_requests} requests, {self.num_tokens} tokens in {self.duration_s:.0f} s"]
        told += [f"  {fault.line()}" for fault in self.faults]
        told.append(
            f"  lost {self.num_lost}, wrong {self.num_wrong}, leaked {len(self.leaks)}, "
            f"broken with a killed router or proxy {self.num_broken_with_router}, "
            f"refused and tried again {self.num_refusals}"
        )
        told.append("  " + ", ".join(f"{name} {value:g}" for name, value in self.counted.items()))
        told += [f"  WARNING: {warning}" for warning in self.warnings]
        told += [f"  FAILED: {problem}" for problem in self.problems]
        if self.warnings and not self.problems:
            told.append(f"  the checks hold, but {'no' if self._all_missed else 'not every'} fault struck as expected")
        elif not self.problems:
            told.append("  all checks hold")
        return told
