"""A worker's reports on its start, kept in Ray's key-value store until the command line reads them.

They are needed because a replica that loads its weights cannot be called, and Serve reports a failed start only as a
traceback.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

NAMESPACE = b"baton"
PREFIX = "start:"
MIN_PERIOD_S = 0.2
PREPARING = "preparing kernels (compiled once per machine)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """How far one replica is. ``refusal`` is the reason why it can never start."""

    role: str
    replica_id: str
    stage: str
    done: int = 0
    total: int = 0
    refusal: str | None = None


def publish_start_report(report: StartReport) -> None:
    """Publish a report, which replaces the replica's earlier one."""
    _internal_kv_put(PREFIX + report.replica_id, json.dumps(asdict(report)), overwrite=True, namespace=NAMESPACE)


def read_start_reports() -> list[StartReport]:
    """The last report of every replica."""
    keys = _internal_kv_list(PREFIX, namespace=NAMESPACE)
    values = [_internal_kv_get(key, namespace=NAMESPACE) for key in keys]
    return [StartReport(**json.loads(value)) for value in values if value is not None]


def clear_start_reports() -> None:
    """Delete the reports of earlier deployments on this Ray."""
    _internal_kv_del(PREFIX, del_by_prefix=True, namespace=NAMESPACE)


def weights_progress(
    role: str, replica_id: str, *, publish: Callable[[StartReport], None] = publish_start_report
) -> Callable[[int, int], None]:
    """A callback that reports loaded bytes, at most once per ``MIN_PERIOD_S``, and the next stage after the last."""
    reported_at_s = 0.0

    def report(done: int, total: int) -> None:
        nonlocal reported_at_s
        now_s = time.monotonic()
        if done >= total:
            publish(StartReport(role=role, replica_id=replica_id, stage=PREPARING))
        elif now_s - reported_at_s >= MIN_PERIOD_S:
            reported_at_s = now_s
            publish(StartReport(role=role, replica_id=replica_id, stage="loading weights", done=done, total=total))

    return report
