"""The counters that a connector updates while it works."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from kv_transfer.connector import LoadEnded
from kv_transfer.peer.lease import LeaseCounts
from kv_transfer.stats import TransferStats, counters_of

_NAMES = tuple(counters_of(TransferStats))
_read_all = attrgetter(*_NAMES)


@dataclass(slots=True, kw_only=True)
class TransferCounters(TransferStats):
    """Counters since the start. Only the connector's thread writes them; any thread may take a snapshot.

    ``num_blocks`` and ``num_bytes`` count everything that was moved, for failed and cancelled loads too.
    ``num_ended_streams`` counts cancelled streams whose end was reported.
    """

    num_ended_streams: int = 0

    def add_load(self, ended: LoadEnded) -> None:
        """Count a load that ended; its blocks and bytes were counted as they came."""
        self.num_transfers += 1
        self.transfer_s += ended.duration_s
        self.transfer_byte_s += ended.duration_s * ended.num_bytes
        self.transfer_bytes_squared += float(ended.num_bytes) ** 2
        if ended.is_cancelled:
            self.num_cancelled_loads += 1
        elif ended.error is not None:
            self.num_failed_loads += 1
            self.num_failed_blocks += len(ended.failed_block_ids)

    def snapshot(self, leases: LeaseCounts, *, num_announced_blocks: int = 0) -> TransferStats:
        """These counters, and those of leases and announcements, as one message."""
        stats = TransferStats(**dict(zip(_NAMES, _read_all(self), strict=True)))
        stats.num_announced_blocks = num_announced_blocks
        stats.num_leases_granted = leases.num_granted
        stats.num_leases_done = leases.num_done
        stats.num_leases_expired = leases.num_expired
        stats.num_leases_aborted = leases.num_aborted
        stats.num_unknown_notifications += leases.num_unknown
        return stats
