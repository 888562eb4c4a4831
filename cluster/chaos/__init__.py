"""Chaos tests against a live cluster: scenarios of injected faults, the load during them, and the checks."""
