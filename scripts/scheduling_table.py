"""Writes the table of docs/scheduling.md from the marks of tests; the rest of the page is written by hand.

`python -m scripts.scheduling_table`
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from scripts.marked_tests import ROOT, marked_tests

PAGE = ROOT / "docs" / "scheduling.md"
BEGIN = "| id | behaviour | tests |\n|---|---|---|\n"

BEHAVIOURS = {
    "C1": "one token budget, no phases",
    "C2": "running first, then waiting; none after a preemption; budget and row limits",
    "C3": "a cap per request; whole prompts without chunking",
    "C4": "who cannot take a token is passed over",
    "C5": "no position at or past the model length",
    "C6": "the last in order is preempted; its tokens return to the step",
    "C7": "a preempted request keeps its tokens and resumes first",
    "C8": "counts advance when a step is scheduled; steps run ahead",
    "C9": "stop conditions",
    "C10": "abort in every state",
    "C11": "what can never fit is refused",
    "C12": "`fcfs` and `priority` queues",
    "C13": "statistics",
    "C14": "finished ids reach the worker once",
    "B1": "content-addressed full blocks",
    "B2": "reference counts, eviction order",
    "B3": "nothing is offered before it is confirmed",
    "B4": "cache events, numbered, with replay",
    "B5": "reset",
    "B6": "common leading blocks",
    "B7": "blocks that left the window of their KV cache group are freed",
    "K1": 'how much a connector can supply; "not known yet"',
    "K2": "loads are set aside",
    "K3": "a load that is done",
    "K4": "a load that failed in part",
    "K6": "policy `recompute` or `fail`",
    "K7": "leases",
    "K8": "transfer statistics",
    "K9": "a chain of sources, with a tier in host memory",
    "O2": "priority preemption before admission",
    "O3": "limits on partial prefills",
    "O4": "delay factor",
    "O5": "choices and beams of a prompt share its blocks",
    "O6": "artificial preemption",
    "O7": "several decode steps at once, none too many",
    "P1": "prompts leave decoding requests the gap that these were promised",
    "P2": "where nobody decodes, prompts share a step only as far as that saves time",
    "P3": "prompts whose promise is lost let those pass whose promise can be kept",
    "F1": "grammars: waits while they compile, masks in the step",
    "F3": "draft tokens are scheduled and verified in one step",
    "F5": "the next step is scheduled while one runs",
    "F7": "log-probabilities; NaN logits are counted",
    "I1": "the same tokens, whatever happens",
    "I2": "blocks are conserved",
}
"""Every behaviour that the scheduler owes, by its id. One that is added here needs a test that carries its id."""


def behaviours_with_tests() -> Mapping[str, list[str]]:
    """The tests that carry each id, as the files say."""
    return marked_tests("behaviour")


def page() -> str:
    """The page as it should be."""
    before, _, after = PAGE.read_text().partition(BEGIN)
    rest = after[after.index("\n\n") :] if "\n\n" in after else "\n"
    return before + BEGIN + "\n".join(_row(name) for name in BEHAVIOURS) + rest


def _row(name: str) -> str:
    tests = (test.split("::") for test in behaviours_with_tests().get(name, []))
    files = (
        f"`tests/{file}`: {', '.join(f'`{test}`' for _, test in group)}"
        for file, group in groupby(tests, key=lambda test: test[0])
    )
    return f"| {name} | {BEHAVIOURS[name]} | {'<br>'.join(files)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
