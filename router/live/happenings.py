"""Derives timeline entries from two states of the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from router.live.sampler import State
from router.live.timeline import Happening, Kind
from router.placement.reason import Reason

_MOVES: tuple[tuple[str, Kind, str], ...] = (
    ("drain_moves", "move", "left a draining worker, with their KV"),
    ("ordered_moves", "move", "moved to another worker by an operator's order"),
    ("gap_moves", "rebalance", "moved to another worker, to keep the promised time between tokens"),
    ("kv_moves", "rebalance", "moved to another worker, which has more room"),
    ("queue_moves", "rebalance", "went to another worker, which computes their prompt sooner"),
    ("migrations", "recovery", "continued on another worker after theirs was lost"),
    ("prefill_retries", "recovery", "had their prompt sent again, to another prefill worker"),
    ("local_prefills", "recovery", "had their prompt computed by their decode worker"),
    ("failed_moves", "fault", "were ordered to move but did not"),
    ("failed", "fault", "ended with an error"),
    ("refused", "refusal", "refused: the limit of waiting requests was reached"),
)


_REASONS = {
    Reason.MODELS_UNKNOWN.value: "without predictions",
    Reason.OVERRIDE.value: "as a setting requires",
    Reason.SESSION.value: "with their session",
    Reason.LEADER.value: "with their first choice",
}
"""Words that do not read well after a number, and their replacements."""


def happenings(before: State, after: State) -> Iterator[Happening]:
    """What is worth telling an operator, workers first; repeated events are one entry."""
    yield from _of_workers(before["workers"], after["workers"], after)
    yield from _of_division(before["workers"], after["workers"])
    yield from _of_targets(before["wanted"], after)
    yield from _of_sizes(before["sizes"], after["sizes"])
    old, new = before["totals"], after["totals"]
    for name, kind, text in _MOVES:
        if (count := new[name] - old[name]) > 0:
            yield Happening(kind=kind, text=f"{count} request{'s' * (count > 1)} {text}", count=count)
    yield from _of_kv(old, new)
    yield from _of_hand_overs(before, after)
    yield from _of_choices(before["choices"], after["choices"])


def _of_workers(old: Mapping[str, State], new: Mapping[str, State], after: State) -> Iterator[Happening]:
    for name in old.keys() - new.keys():
        yield Happening(kind="worker_gone", text=f"{old[name]['role']} worker is gone", replica=name)
    for name, row in new.items():
        was = old.get(name, {"state": "starting", "leaning": row["leaning"]})
        role, state = row["role"], row["state"]
        if state == "left_out" and was["state"] != "left_out":
            text = f"{role} worker does not answer: no requests go there"
            yield Happening(kind="worker_left_out", text=text, replica=name)
        elif state == "draining" and was["state"] != "draining":
            yield Happening(kind="drain", text=f"{role} worker drains", replica=name)
        elif state == "running" and was["state"] in ("starting", "left_out"):
            came = "started" if was["state"] == "starting" else "is back"
            yield Happening(kind="worker_up", text=f"{role} worker {came}", replica=name)
        if row["leaning"] != was["leaning"]:
            yield Happening(kind="lean", text=_leaning_text(name, row, after), replica=name)


def _of_division(old: Mapping[str, State], new: Mapping[str, State]) -> Iterator[Happening]:
    """Whether the work is divided among the workers, and among how many of them."""
    was, now = _num_keeping(old), _num_keeping(new)
    if was == now:
        return
    text = "work is not divided any more: all workers take any work"
    if now:
        text = f"work is divided: workers for streams {now['stream']}, for prompts {now['prompt']}"
    yield Happening(kind="divide", text=text)


def _num_keeping(workers: Mapping[str, State]) -> Counter[str]:
    """The number of workers that keep to each kind of work."""
    return Counter(row["keeps_to"] for row in workers.values() if "keeps_to" in row)


def _of_targets(old: Mapping[str, int], after: State) -> Iterator[Happening]:
    """Pools whose wanted number of workers changed, by the load or a configuration. If a router decided it, the entry
    with the router's reason is used instead."""
    decided = {(row["role"], row["wanted"]) for row in after["sizes"].values()}
    for role, number in after["wanted"].items():
        if (was := old.get(role, number)) != number and (role, number) not in decided:
            yield Happening(kind="scale", text=f"{role} workers wanted: {number}, {was} before")


def _of_sizes(old: Mapping[str, State], new: Mapping[str, State]) -> Iterator[Happening]:
    for name in sorted(new.keys() - old.keys()):
        row = new[name]
        text = f"{row['role']}: {row['wanted']} workers instead of {row['before']}, {row['reason']}"
        yield Happening(kind="scale", text=text)


def _leaning_text(name: str, row: State, after: State) -> str:
    text = f"{row['role']} worker leans to {row['leaning']}"
    change = after["leanings"].get("last_change", {})
    if name in after["leanings"]["held_until"]:
        return f"{text}: an operator's order"
    is_this = change.get("replica") == name and change.get("leaning") == row["leaning"]
    return f"{text}: {change['reason']}" if is_this else text


def _of_kv(old: State, new: State) -> Iterator[Happening]:
    if (count := new["injected_faults"] - old["injected_faults"]) > 0:
        yield Happening(kind="fault", text=f"{count} faults injected", count=count)
    if (count := new["corrupt_blocks"] - old["corrupt_blocks"]) > 0:
        yield Happening(kind="fault", text=f"{count} KV blocks arrived damaged", count=count)
    if (count := new["failed_blocks"] - old["failed_blocks"]) > 0:
        yield Happening(kind="fault", text=f"{count} KV blocks could not be read", count=count)
    if (count := new["recomputed_tokens"] - old["recomputed_tokens"]) > 0:
        yield Happening(kind="recovery", text=f"{count} tokens whose KV was lost were computed again", count=count)


def _of_hand_overs(before: State, after: State) -> Iterator[Happening]:
    old, new = before["hand_overs"], after["hand_overs"]
    if (count := new["count"] - old["count"]) > 0:
        size = (new["bytes"] - old["bytes"]) / 1e6
        targets = [
            name
            for name, row in after["workers"].items()
            if row["hand_overs"] > before["workers"].get(name, {"hand_overs": 0})["hand_overs"]
        ]
        at = f" to {len(targets)} workers" if len(targets) > 1 else ""
        text = f"{count} hand-over{'s' * (count > 1)}{at}, {size:.1f} MB"
        yield Happening(kind="hand_over", text=text, replica=targets[0] if len(targets) == 1 else None, count=count)
    for tier, counts in after["tiers"].items():
        loaded = counts["loaded_blocks"] - before["tiers"].get(tier, {"loaded_blocks": 0})["loaded_blocks"]
        if loaded > 0:
            yield Happening(kind="hand_over", text=f"{loaded} KV blocks came from the {tier} tier", count=loaded)


def _of_choices(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[Happening]:
    more = {reason: new[reason] - old[reason] for reason in new if new[reason] > old[reason]}
    if more:
        text = ", ".join(f"{count} {_REASONS.get(reason, reason.replace('_', ' '))}" for reason, count in more.items())
        yield Happening(kind="choice", text=f"placed: {text}", count=sum(more.values()))
