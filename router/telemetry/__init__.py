"""Spans of a process for an OpenTelemetry collector. The SDK is not loaded before spans are wanted."""
