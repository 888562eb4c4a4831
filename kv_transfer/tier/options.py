"""What the settings of every tier can say of themselves."""

from __future__ import annotations


class TierOptions:
    """The settings of one tier, among them ``<name of the tier>_bytes``: how much it may keep, 0 without it.

    ``ConnectorOptions`` are the options of every tier at once, so that each is asked through its own class:
    ``HostTierOptions.main_memory_bytes(options)``.
    """

    def main_memory_bytes(self) -> int:
        """What the tier takes of the main memory of each worker."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse settings of a tier that contradict each other, whether it is used or not.

        Raises:
            InvalidOptionError: Names the options and their values.
        """
