"""Sampling: filters, penalties, counter-based randomness."""
