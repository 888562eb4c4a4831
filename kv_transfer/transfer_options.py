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
    """How blocks move, and how long that may take.

    ``checksums`` None means: where the KV cache lies in host memory. ``streamed``: hand prompts over while they are
    computed; ``auto`` tells readers of what lies in host memory so seldom that it takes next to nothing from a prefill
    on the same cores. ``transport`` is what ``nixl`` moves blocks over: ``local`` between processes of one user on one
    machine, which listen on nothing; ``network`` between machines; ``auto`` is for whoever knows the cluster to decide,
    and means ``network`` where nobody did. A read that goes on for ``hung_read_timeout_s`` after its load ran out of
    time counts as hanging for good.
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
        """Refuse what cannot be, and faults that nobody allowed.

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
                "faults: some are configured, but allow_faults is not true: set it if they are meant, or leave them out"
            )
