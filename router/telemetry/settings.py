"""Where spans are sent, and for which share of requests."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Where spans are exported to. With ``otlp_endpoint`` None there are no spans; otherwise it is the collector's URL,
    to which `/v1/traces` is appended if it has no path.

    ``sample_ratio`` is the share of traces started here that is exported; a request that says whether its trace is
    sampled decides for itself. None uses the environment's OTEL_TRACES_SAMPLER, or samples everything if that is not
    set.
    """

    otlp_endpoint: str | None = None
    sample_ratio: float | None = None
    service_name: str | None = None

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None:
            self._check_endpoint(self.otlp_endpoint)
        if self.sample_ratio is not None and not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"sample_ratio must be from 0 to 1, got {self.sample_ratio}")
        if self.service_name == "":
            raise ValueError("service_name is empty: leave it out, or give one")

    @staticmethod
    def _check_endpoint(endpoint: str) -> None:
        try:
            url = urlsplit(endpoint)
            is_usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ValueError(
                f"otlp_endpoint is {endpoint!r}: it must be the URL at which a collector takes OTLP over HTTP, such as "
                "http://localhost:4318"
            )

    @property
    def is_on(self) -> bool:
        """True if spans should be made."""
        return self.otlp_endpoint is not None

    @property
    def traces_url(self) -> str:
        """Where spans are sent to."""
        assert self.otlp_endpoint is not None
        has_path = bool(urlsplit(self.otlp_endpoint).path.strip("/"))
        return self.otlp_endpoint if has_path else self.otlp_endpoint.rstrip("/") + TRACES_PATH


NO_TRACING = TracingSettings()
