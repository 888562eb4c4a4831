"""Which faults a connector is to suffer on purpose, as configured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kv_transfer.errors import InvalidOptionError


class Fault(StrEnum):
    """What can be made to go wrong; each is the name of its probability in ``FaultOptions``."""

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
    """The ``nth`` occasion (from 1) for ``fault`` is taken, whatever its probability."""

    # Read by whoever validates configuration files: a key that does not exist is refused there.
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
    """Probabilities from 0 to 1 for each occasion, and occasions that are taken by number.

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
        """Refuse what is no probability.

        Raises:
            InvalidOptionError: Names the key and its value.
        """
        for fault in Fault:
            if not 0.0 <= self.probability(fault) <= 1.0:
                raise InvalidOptionError(f"faults.{fault}: a probability lies in 0 to 1, got {self.probability(fault)}")
        if not 0.0 <= self.late_s < math.inf:
            raise InvalidOptionError(f"faults.late_s: a delay is a number of seconds from 0 on, got {self.late_s}")

    def probability(self, fault: Fault) -> float:
        """How likely an occasion for ``fault`` is taken."""
        value: float = getattr(self, fault.value)
        return value
