"""Faults of a virtual cluster: processes that stand still, and connections that are slow, silent or cut."""
