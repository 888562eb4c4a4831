"""Checks whether this installation can send spans as configured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from engine.contract.errors import ConfigError
from router.telemetry.settings import TracingSettings

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
PROTOCOL = "http/protobuf"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first of these variables that is set counts."""


class TracingUnavailableError(ConfigError):
    """Spans are wanted but cannot be sent; the message is one line that says what to change."""


def check_available(
    settings: TracingSettings,
    *,
    environment: Mapping[str, str] = os.environ,
    is_installed: Callable[[str], bool] | None = None,
) -> None:
    """Refuse, before anything starts, settings that would fail in every process later.

    Raises:
        TracingUnavailableError: The extra is not installed, or an unsupported protocol is configured.
    """
    if not settings.is_on:
        return
    if not (is_installed or _is_installed)(EXPORTER):
        raise TracingUnavailableError(
            f"tracing.otlp_endpoint is {settings.otlp_endpoint!r}, but OpenTelemetry's exporter is not installed: "
            "pip install 'baton-serve[otel]' on every machine, or leave tracing.otlp_endpoint out"
        )
    named = next((name for name in PROTOCOL_VARIABLES if environment.get(name)), None)
    if named is not None and environment[named] != PROTOCOL:
        raise TracingUnavailableError(
            f"{named} is {environment[named]!r}, and Baton sends spans by {PROTOCOL!r} only: unset it, or set it to "
            "that, and let tracing.otlp_endpoint name the collector's port for it (4318 unless told otherwise)"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
