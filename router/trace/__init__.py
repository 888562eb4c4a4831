"""Traces of requests: where each one spent its time, and why it went there."""
