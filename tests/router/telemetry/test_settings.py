"""The settings of tracing: which are refused, what they mean, and that nothing is loaded while tracing is off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.telemetry.availability import TracingUnavailableError, check_available
from router.telemetry.settings import NO_TRACING, TracingSettings
from router.telemetry.tracer import ProcessTracer

ENDPOINT = "http://localhost:4318"
ON = TracingSettings(otlp_endpoint=ENDPOINT)

LOADED = """
import sys
import cluster.config.config, router.api.app, engine.frontend.async_engine, router.telemetry.worker_spans
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://c:4317", "http://", "http://c:99999", "", "http://[::1"]
)
def test_endpoint_that_is_no_url_is_refused_with_one_that_is(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"otlp_endpoint is .* such as http://localhost:4318"):
        TracingSettings(otlp_endpoint=endpoint)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_ratio_beyond_all_or_nothing_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="sample_ratio must be from 0 to 1"):
        TracingSettings(sample_ratio=ratio)


@pytest.mark.parametrize(
    "endpoint, url",
    [
        (ENDPOINT, f"{ENDPOINT}/v1/traces"),
        (f"{ENDPOINT}/", f"{ENDPOINT}/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_path_is_added_where_there_is_none(endpoint: str, url: str) -> None:
    assert TracingSettings(otlp_endpoint=endpoint).traces_url == url


def test_exporter_that_is_not_installed_is_refused_with_what_installs_it() -> None:
    with pytest.raises(TracingUnavailableError, match=r"pip install 'baton-serve\[otel\]'"):
        check_available(ON, environment={}, is_installed=lambda name: False)


def test_protocol_that_is_not_spoken_is_refused_by_its_variable() -> None:
    with pytest.raises(TracingUnavailableError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        check_available(ON, environment={"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})

    check_available(
        ON,
        environment={"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
    )


def test_nothing_is_asked_of_an_installation_that_makes_no_spans() -> None:
    check_available(NO_TRACING, environment={"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, is_installed=lambda name: False)


def test_sdk_is_not_loaded_where_no_spans_are_made() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)

    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "settings, environment, name",
    [
        (ON, {}, "baton"),
        (ON, {"OTEL_SERVICE_NAME": "theirs"}, "theirs"),
        (ON, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs"}, "theirs"),
        (TracingSettings(otlp_endpoint=ENDPOINT, service_name="mine"), {"OTEL_SERVICE_NAME": "theirs"}, "mine"),
    ],
)
def test_service_has_the_name_that_it_was_given(
    settings: TracingSettings, environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    tracer = ProcessTracer(settings, role="router", instance_id="r")

    assert tracer.resource["service.name"] == name
    tracer.close()
