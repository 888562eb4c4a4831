"""What a connector counts while it works."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.connector import LoadEnded, TransferStats
from kv_transfer.peer.lease import LeaseCounts


@dataclass(slots=True, kw_only=True)
class TransferCounters:
    """Counters since the start, written by the connector's thread alone; anyone may take a snapshot.

    ``num_blocks`` and ``num_bytes`` count what was moved, be it of any use or not: failed and cancelled loads too.
    ``num_ended_streams`` are the cancelled ones that were reported.
    """

    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    transfer_s: float = 0.0
    num_failed_loads: int = 0
    num_failed_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_cancelled_loads: int = 0
    num_retried_loads: int = 0
    num_stalled_loads: int = 0
    num_streams: int = 0
    num_ended_streams: int = 0
    num_streamed_blocks: int = 0
    num_streamed_bytes: int = 0
    num_handshakes: int = 0
    num_handshakes_failed: int = 0
    num_unknown_notifications: int = 0
    num_injected_faults: int = 0

    def add_load(self, ended: LoadEnded) -> None:
        """Count a load that ended; its blocks and bytes were counted as they came."""
        self.num_transfers += 1
        self.transfer_s += ended.duration_s
        if ended.is_cancelled:
            self.num_cancelled_loads += 1
        elif ended.error is not None:
            self.num_failed_loads += 1
            self.num_failed_blocks += len(ended.failed_block_ids)

    def snapshot(self, leases: LeaseCounts, *, num_announced_blocks: int = 0) -> TransferStats:
        """These counters, and those of leases and announcements, as one message."""
        return TransferStats(
            num_transfers=self.num_transfers,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            transfer_s=self.transfer_s,
            num_failed_loads=self.num_failed_loads,
            num_failed_blocks=self.num_failed_blocks,
            num_corrupt_blocks=self.num_corrupt_blocks,
            num_cancelled_loads=self.num_cancelled_loads,
            num_retried_loads=self.num_retried_loads,
            num_stalled_loads=self.num_stalled_loads,
            num_streams=self.num_streams,
            num_streamed_blocks=self.num_streamed_blocks,
            num_streamed_bytes=self.num_streamed_bytes,
            num_announced_blocks=num_announced_blocks,
            num_leases_granted=leases.num_granted,
            num_leases_done=leases.num_done,
            num_leases_expired=leases.num_expired,
            num_leases_aborted=leases.num_aborted,
            num_handshakes=self.num_handshakes,
            num_handshakes_failed=self.num_handshakes_failed,
            num_unknown_notifications=self.num_unknown_notifications + leases.num_unknown,
            num_injected_faults=self.num_injected_faults,
        )
