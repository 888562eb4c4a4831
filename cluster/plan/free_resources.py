"""What of a machine is not booked yet, as Ray counts it."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.plan.inventory import Node

EPSILON = 1e-6
"""Ray books in steps of 0.0001."""


class FreeResources:
    """One machine's. A part of a GPU comes from one GPU: what two have left, together, is no use to anybody."""

    def __init__(self, node: Node) -> None:
        self._amounts = {name: amount for name, amount in node.offers.items() if name != "GPU"}
        self._gpus = [1.0] * int(node.num_gpus)

    def fit(self, demands: Mapping[str, float]) -> bool:
        """True when all of it can be booked."""
        amounts = (item for item in demands.items() if item[0] != "GPU")
        enough = all(self._amounts.get(name, 0.0) + EPSILON >= amount for name, amount in amounts if amount > 0)
        return enough and self._choose_gpus(demands.get("GPU", 0.0)) is not None

    def take(self, demands: Mapping[str, float]) -> None:
        """Book what fits."""
        for index, part in (self._choose_gpus(demands.get("GPU", 0.0)) or {}).items():
            self._gpus[index] -= part
        for name, amount in demands.items():
            if name != "GPU":
                self._amounts[name] = self._amounts.get(name, 0.0) - amount

    def _choose_gpus(self, amount: float) -> dict[int, float] | None:
        """Which GPUs, and how much of each: whole ones, and for a part the fullest that has it left; None: too few."""
        num_whole = int(amount + EPSILON)
        part = amount - num_whole
        untouched = [index for index, free in enumerate(self._gpus) if free >= 1.0 - EPSILON]
        if len(untouched) < num_whole:
            return None
        chosen = dict.fromkeys(untouched[:num_whole], 1.0)
        if part > EPSILON:
            left = {index: free for index, free in enumerate(self._gpus) if index not in chosen}
            enough = [index for index, free in left.items() if free + EPSILON >= part]
            if not enough:
                return None
            chosen[min(enough, key=lambda index: left[index])] = part
        return chosen
