"""Reasons to keep a request waiting, one question each. Free of torch."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from engine.core.request import Request
from engine.core.step_draft import StepDraft


class Verdict(Enum):
    """What became of a request at the door."""

    ADMITTED = auto()
    PASSED_OVER = auto()
    BARRIER = auto()


class AdmissionGate(Protocol):
    """Limits what may start in a step: room for LoRA adapters, grammars, encoder inputs, and what is here already."""

    def ask(self, request: Request, draft: StepDraft, /) -> Verdict:
        """ADMITTED: as far as this gate is concerned. PASSED_OVER: not this one. BARRIER: none from here on."""
