"""The layouts of the regret matrix, as configurations of clusters of two threads."""

from __future__ import annotations

import argparse

from cluster.config.config import BatonConfig
from simulation.layout import EVERY_PROMPT

APART, ONE, ONE_SMALL, TWO, ELASTIC = "apart", "one", "one_small", "two", "elastic"
FIXED = (APART, ONE, ONE_SMALL, TWO)
LAYOUTS = (*FIXED, ELASTIC)


def matrix_settings(name: str, args: argparse.Namespace) -> dict[str, object]:
    """The configuration of a layout. If decode workers compute prompts themselves, the prefill worker sleeps.

    Elastic is the default configuration with the promise; who names ``num_threads`` keeps to them.

    Raises:
        SystemExit: This version has no elastic roles.
    """
    thread = {"num_threads": 1}
    # A layout that was chosen stays as it was: where roles can change, they are told not to.
    fixed = {"roles": "fixed"} if "roles" in BatonConfig.model_fields else {}
    if name == ELASTIC:
        return elastic_settings(args)  # a core each, and the other's while that is idle: the default
    if name == APART:
        return {**fixed, "prefill": thread, "decode": thread}
    all_local = {**fixed, "router": {"local_prefill_tokens": EVERY_PROMPT}, "prefill": thread}
    if name == TWO:
        return {**all_local, "decode_replicas": 2, "decode": thread}
    chunks = {"max_num_batched_tokens": args.small_chunk} if name == ONE_SMALL else {}
    return {**all_local, "decode": {"num_threads": 2, "scheduler": chunks}}


def elastic_settings(args: argparse.Namespace) -> dict[str, object]:
    """The settings of a cluster with elastic roles and a promise.

    Raises:
        SystemExit: This version has no such setting.
    """
    known = BatonConfig.model_fields
    if "roles" not in known:
        raise SystemExit(
            "the layout elastic needs the setting `roles`, which this version of Baton does not have: name the others "
            f"with --layouts {' '.join(FIXED)}"
        )
    promise = {"slo": {"ttft_ms": args.ttft_limit_ms, "itl_ms": args.itl_limit_ms}}
    return {"roles": "elastic", **(promise if "slo" in known else {})}
