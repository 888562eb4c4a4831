"""Spans of a process for an OpenTelemetry collector. Nothing of the SDK is loaded before somebody wants one."""
