"""What a cluster tells of itself to other systems, in the configuration."""

from __future__ import annotations

from pydantic import Field

from cluster.config.config_section import Section, section_of
from router.settings import MetricsCompat
from router.telemetry.settings import TracingSettings


class MetricsSection(Section):
    """What `/metrics` offers."""

    compat: MetricsCompat = Field(
        default="none", description="Add the names of another system, for dashboards made for it."
    )


TracingSection = section_of(
    "TracingSection",
    TracingSettings,
    descriptions={
        "otlp_endpoint": "URL of an OpenTelemetry collector that takes OTLP over HTTP, as `http://localhost:4318`; "
        "`/v1/traces` is added where it has no path. Null makes no spans. Needs the extra `otel` on every machine.",
        "sample_ratio": "Share of the traces that begin here of which spans are made, 0 to 1; a request with a "
        "`traceparent` is followed in what that says. Null goes by `OTEL_TRACES_SAMPLER`, and without that takes all.",
        "service_name": "The resource's `service.name`; null takes `OTEL_SERVICE_NAME`, or `baton`.",
    },
)
