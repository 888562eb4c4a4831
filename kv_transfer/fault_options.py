"""The configuration of injected faults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kv_transfer.errors import InvalidOptionError


class Fault(StrEnum):
    """The faults that can be injected. Each value is the name of the fault's probability in ``FaultOptions``."""

    READ_FAILS = "read_fails"
    READ_HANGS = "read_hangs"
    READ_LATE = "read_late"
    BIT_FLIPS = "bit_flips"
    HANDSHAKE_REFUSED = "handshake_refused"
    NOTIFICATION_LOST = "notification_lost"
    NOTIFICATION_LATE = "notification_late"
    NOTIFICATION_TWICE = "notification_twice"
    LEASE_EXPIRED = "lease_expired"
    PEER_REPLACED = "peer_replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledFault:
    """Inject ``fault`` on its ``nth`` occasion (counted from 1), whatever its probability."""

    # pydantic reads this when it validates configuration files: it refuses unknown keys.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    fault: Fault
    nth: int

    def __post_init__(self) -> None:
        """Refuse an occasion that never comes.

        Raises:
            InvalidOptionError: ``nth`` is less than 1.
        """
        if self.nth < 1:
            raise InvalidOptionError(f"faults.schedule: nth counts from 1, got {self.nth}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """How likely each fault is, from 0 to 1, on each occasion for it; and faults injected on the n-th occasion.

    Occasions are: a posted read (``read_*``, ``bit_flips``, ``peer_replaced``), a message to send (``notification_*``),
    a handshake that this engine begins (``handshake_refused``), a reader's "done" (``lease_expired``).
    """

    seed: int = 0
    read_fails: float = 0.0
    read_hangs: float = 0.0
    read_late: float = 0.0
    bit_flips: float = 0.0
    handshake_refused: float = 0.0
    notification_lost: float = 0.0
    notification_late: float = 0.0
    notification_twice: float = 0.0
    lease_expired: float = 0.0
    peer_replaced: float = 0.0
    late_s: float = 0.05
    schedule: tuple[ScheduledFault, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that are not probabilities.

        Raises:
            InvalidOptionError: Names the key and its value.
        """
        for fault in Fault:
            if not 0.0 <= self.probability(fault) <= 1.0:
                raise InvalidOptionError(f"faults.{fault}: a probability lies in 0 to 1, got {self.probability(fault)}")
        if not 0.0 <= self.late_s < math.inf:
            raise InvalidOptionError(f"faults.late_s: a delay is a number of seconds from 0 on, got {self.late_s}")

    def probability(self, fault: Fault) -> float:
        """The probability that ``fault`` is injected on an occasion for it."""
        value: float = getattr(self, fault.value)
        return value
