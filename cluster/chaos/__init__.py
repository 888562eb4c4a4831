"""Faults on purpose against a live cluster: scenarios, the load they run under, and what is checked."""
