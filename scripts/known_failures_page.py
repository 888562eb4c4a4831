"""Writes docs/known-failures.md from the marks of tests.

`python -m scripts.known_failures_page > docs/known-failures.md`
"""

from __future__ import annotations

from scripts.marked_tests import marked_tests

HEADER = """# Known failures

How systems that move KV between workers have broken in production, what Baton does instead, and the tests that hold it.
A test carries the numbers of its rows: `@pytest.mark.known_failure(4, 5)`. Row 15, ports that workers of a machine
fight over, cannot occur: workers meet over Ray.

| # | what goes wrong elsewhere, and what happens here | tests |
|---|---|---|
"""

ROWS = {
    1: "blocks are read after their owner reused them: a read counts only when its source confirms the lease",
    2: "a dead reader strands blocks: leases end in seconds, and all of them are looked at",
    3: "a request that decode refuses leaves its blocks pinned: every refusal releases the lease",
    4: "an aborted load writes into another request's blocks: its destination is held until nothing can write it",
    5: "blocks of an aborted load are never freed: every hold has an end or a deadline",
    6: "a late or duplicate event kills the engine: what is unknown is counted and ignored",
    7: "loads that each hold half of the cache wait for each other: room for all of a load is there before it begins",
    8: "an idle engine sleeps through the end of a load: whatever makes work schedulable wakes it",
    9: "freed blocks are reused while a step still writes them: they are fenced until it returned",
    10: "an empty or short block list is handed over: blocks must cover the tokens, on both sides",
    11: "the prefix cache offers blocks that failed to load: nothing is published before it is confirmed",
    12: "a peer that restarts on the same address breaks everything: incarnations, and a new meeting",
    13: "a failed generation is answered with 200 and nothing: an error is a status, or an event of the stream",
    14: "a client waits for ever for a transfer that failed: every wait has a deadline and a named error",
    16: "usage and cached tokens go wrong between two engines: the router counts what each of them tells it",
    17: "the first token is computed twice: decode starts from the second",
    18: "a refused handshake leaves the request waiting: it is a failed load",
    19: "computing again goes wrong where steps run ahead: what runs ahead gives the tokens of what does not",
    20: "a preempted request's blocks are kept under the wrong address: addresses come from tokens",
    21: "the first transfer after hours of idleness fails: it is tried again over a new connection",
    22: "a cancelled prefill leaves half-written blocks: only whole, computed blocks are ever found",
    23: "one stuck worker holds up all requests: it is left out, by the age of its reports or of its last step",
    24: "the ratio of prefill to decode is wrong an hour later: pools follow their load",
    26: "a finished request stays the owner of a prefix that it never published, and whoever needs it waits for ever: "
    "only live requests own a claim, and only on what they lack",
    37: "accepted choices are refused later by a full queue: all are counted when they come, and then wait",
    38: "anyone on the network writes a worker's memory through the transport: on one machine no port is opened",
    39: "one call without a token ends Ray's head, whoever makes it: a private Ray asks for a certificate before that",
    40: "an empty datagram of any local user to UCX's sockets ends a worker: the kernel drops those",
}


def rows_with_tests() -> dict[int, list[str]]:
    """The tests that carry each number, as the files say."""
    return dict(sorted(marked_tests("known_failure").items()))


def page() -> str:
    """The page as it should be."""
    rows = [
        f"| {row} | {ROWS[row]} | {'<br>'.join(f'`{test}`' for test in tests)} |\n"
        for row, tests in rows_with_tests().items()
    ]
    return HEADER + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
