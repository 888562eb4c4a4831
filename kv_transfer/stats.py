"""The counters of a connector, and how to declare one: a single field defines how it is shown everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How a counter is shown.

    text: what it counts, for people who read `/metrics`.
    metric: its name in `/metrics`, after ``baton:`` and before ``_total``; None: the name of the field.
    labels: its additional labels in `/metrics`; they tell counters of one metric apart.
    vllm: its name in vLLM's server, if vLLM has this counter.
    total: its name among the totals of `/status`, if it is shown there.
    is_of_loads: a load in several parts counts once, not once for each part.
    """

    text: str = ""
    metric: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    vllm: str | None = None
    total: str | None = None
    is_of_loads: bool = False


def counted(
    text: str = "",
    *,
    metric: str | None = None,
    labels: tuple[tuple[str, str], ...] = (),
    vllm: str | None = None,
    total: str | None = None,
    is_of_loads: bool = False,
    start: float = 0,
) -> Any:
    """Declare a counter as a field of a dataclass; see ``Counted``. It begins at ``start``."""
    told = Counted(text=text, metric=metric, labels=labels, vllm=vllm, total=total, is_of_loads=is_of_loads)
    return field(default=start, metadata={"counted": told})


def counters_of(kind: type) -> Mapping[str, Counted]:
    """The counters that a dataclass declares, by the names of their fields."""
    return {item.name: item.metadata["counted"] for item in fields(kind) if "counted" in item.metadata}


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Counters since the start of the connector.

    ``num_transfers`` counts loads that ended; cancelled loads count neither as failed nor as good. A failed load may
    have good blocks; ``num_corrupt_blocks`` counts failed blocks with a wrong checksum. ``num_blocks`` counts all
    blocks that were moved, for any load and whether they were used or not; ``num_bytes`` is the size of these blocks.
    ``transfer_byte_s`` sums over loads their seconds times their bytes, and ``transfer_bytes_squared`` the squares of
    their bytes: with the other sums they tell what each load takes, and what each byte.
    ``num_streamed_blocks`` counts blocks of good loads that arrived before the load was ordered, during the prefill.
    ``tiers`` are the counters of each tier by its name: ``loaded_blocks`` and ``loaded_bytes`` are part of
    ``num_blocks`` and ``num_bytes``, ``refused_blocks`` found no free slot or no free buffer, and what else a storage
    counts (``TierStorage.counters``).
    """

    num_transfers: int = counted(
        "KV loads that ended, successful or not.", metric="kv_transfers", total="transfers", is_of_loads=True
    )
    num_bytes: int = counted(
        "Bytes of KV read from other engines.", metric="kv_transfer_bytes", total="transferred_bytes"
    )
    num_blocks: int = counted(
        "KV blocks read from other engines.", metric="kv_transfer_blocks", total="transferred_blocks"
    )
    transfer_s: float = counted(
        "Time from the beginning to the end of KV loads.", metric="kv_transfer_seconds", is_of_loads=True, start=0.0
    )
    transfer_byte_s: float = counted(is_of_loads=True, start=0.0)
    transfer_bytes_squared: float = counted(is_of_loads=True, start=0.0)
    num_failed_loads: int = counted(
        "KV loads that failed.", metric="kv_transfer_failures", total="failed_loads", is_of_loads=True
    )
    num_failed_blocks: int = counted(is_of_loads=True)
    num_corrupt_blocks: int = counted(
        "KV blocks that arrived with a wrong checksum.", metric="kv_transfer_corrupt_blocks"
    )
    num_cancelled_loads: int = counted(is_of_loads=True)
    num_retried_loads: int = counted()
    num_stalled_loads: int = counted(is_of_loads=True)
    num_streams: int = counted()
    num_streamed_blocks: int = counted(total="streamed_blocks")
    num_streamed_bytes: int = counted()
    num_announced_blocks: int = counted()
    num_leases_granted: int = counted("Leases granted on KV blocks.", metric="leases_granted", total="leases_granted")
    num_leases_done: int = counted("Leases that ended when their reader was done.", metric="leases_done")
    num_leases_expired: int = counted("Leases that expired.", metric="leases_expired", total="leases_expired")
    num_leases_aborted: int = counted(
        "Leases that ended because their KV was no longer needed.", metric="leases_aborted", total="leases_aborted"
    )
    num_handshakes: int = counted()
    num_handshakes_failed: int = counted()
    num_unknown_notifications: int = counted()
    num_injected_faults: int = counted()
    tiers: dict[str, Mapping[str, int]] = field(default_factory=dict)


def tier_counters(tiers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The counters of all tiers by their names in load reports: ``num_<tier>_<counter>``."""
    return {f"num_{tier}_{name}": value for tier, of_tier in tiers.items() for name, value in of_tier.items()}


def counted_tiers(names: Iterable[str]) -> tuple[str, ...]:
    """The tiers that are counted under these names."""
    hits = (name.removeprefix("num_") for name in names if name.endswith("_hit_blocks"))
    return tuple(name.removesuffix("_hit_blocks") for name in hits)
