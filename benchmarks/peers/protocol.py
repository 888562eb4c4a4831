"""The protocol on a peer's pipes. Runs in the peers' environments, so it only uses the standard library.

A request is one line of JSON, ``{"prompts": [[ids]], "num_tokens": n}``; the answer is ``{"seconds": s}``. The first
line of all, ``{"ready": true}``, comes from the peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence


def check_lengths(outputs: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Fail if an engine generated fewer tokens than requested: its time would be meaningless."""
    shortest = min(len(output) for output in outputs)
    if shortest < num_tokens:
        raise RuntimeError(f"{num_tokens} tokens were asked for, an output has {shortest}")


def serve(load: Callable[[], Callable[[list[list[int]], int], None]]) -> None:
    """Load the engine, then time ``generate(prompts, num_tokens)`` for each line until the input ends."""
    # Engines print to standard output as they like: what is said to the parent goes through a copy of it.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = load()
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        generate(request["prompts"], request["num_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - started}), file=answers)
