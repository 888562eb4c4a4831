"""The base class of every tier's settings."""

from __future__ import annotations


class TierOptions:
    """The settings of one tier. ``<name of the tier>_bytes`` is its size; 0 when the tier is not used.

    ``ConnectorOptions`` has the options of all tiers. So call these methods through the class of one tier:
    ``HostTierOptions.main_memory_bytes(options)``.
    """

    def main_memory_bytes(self) -> int:
        """How many bytes of each worker's main memory the tier takes."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse settings of a tier that contradict each other, whether it is used or not.

        Raises:
            InvalidOptionError: Names the options and their values.
        """
