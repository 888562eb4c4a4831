"""Faults of every kind on a real cluster."""
