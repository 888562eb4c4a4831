"""The settings of everything that moves blocks, whatever lies at the other end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kv_transfer.errors import InvalidOptionError
from kv_transfer.fault_options import FaultOptions

TransportChoice = Literal["auto", "local", "network"]


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How KV blocks move between engines, with the time limits for that.

    checksums: verify each block; None: only if the KV cache lies in host memory.
    streamed: hand prompts over while they are computed. With ``auto``, blocks in host memory are announced so rarely
        that this hardly slows down a prefill on the same cores.
    transport: what ``nixl`` uses. ``local``: shared memory of one user's processes on one machine, without listening
        ports. ``network``: TCP or RDMA between machines. ``auto``: the cluster decides; without a cluster ``network``.
    hung_read_timeout_s: a read that continues for this long after its load timed out counts as hanging permanently.
    """

    lease_ttl_s: float = 30.0
    handshake_timeout_s: float = 10.0
    load_timeout_s: float = 30.0
    answer_timeout_s: float = 5.0
    hung_read_timeout_s: float = 30.0
    transport: TransportChoice = "auto"
    streamed: bool | Literal["auto"] = "auto"
    checksums: bool | None = None
    faults: FaultOptions | None = None
    allow_faults: bool = False

    def check_transfer(self) -> None:
        """Refuse impossible values, and faults that are not allowed.

        Raises:
            InvalidOptionError: Names the option and its value.
        """
        if self.transport not in get_args(TransportChoice):
            raise InvalidOptionError(
                f"transport must be one of {', '.join(get_args(TransportChoice))}, got {self.transport!r}"
            )
        times = ("lease_ttl_s", "handshake_timeout_s", "load_timeout_s", "answer_timeout_s", "hung_read_timeout_s")
        for name in times:
            seconds: float = getattr(self, name)
            if not 0.0 < seconds < math.inf:
                raise InvalidOptionError(f"{name} must be a number of seconds above 0, got {seconds:g}")
        if self.faults is not None and not self.allow_faults:
            raise InvalidOptionError(
                "faults: faults are configured, but allow_faults is not true: set it, or leave faults out"
            )
