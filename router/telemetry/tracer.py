"""The OpenTelemetry SDK of one process: makes spans, and sends them to a collector from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from engine.contract.tracing.request_timings import TraceContext
from router.telemetry.availability import check_available
from router.telemetry.settings import TracingSettings
from router.version import baton_version

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span, Tracer

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, AttributeValue]
Kind: TypeAlias = Literal["server", "client", "internal"]

DEFAULT_SERVICE_NAME = "baton"
UNNAMED = "unknown_service"
"""Prefix of the SDK's default service name."""

CLOSING_THREAD = "baton-spans-close"

CLOSE_TIMEOUT_S = 3.0
"""How long a process waits at its end for unsent spans."""


class OpenSpan:
    """A span that has not ended. Times are wall-clock nanoseconds, so that spans can be made afterwards."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, span: Span, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer

    @property
    def trace_id(self) -> str:
        """The trace id, as headers and collectors write it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def context(self) -> TraceContext:
        """What another process needs to make child spans of this one."""
        context = self._span.get_span_context()
        traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        return TraceContext(traceparent=traceparent, tracestate=context.trace_state.to_header())

    def open(
        self, name: str, *, start_ns: int, kind: Kind = "internal", attributes: Attributes | None = None
    ) -> OpenSpan:
        """Open a child span."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        inside = set_span_in_context(self._span)
        span = self._tracer.start_span(
            name, context=inside, kind=SpanKind[kind.upper()], start_time=start_ns, attributes=attributes
        )
        return OpenSpan(span, self._tracer)

    def add(self, name: str, *, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """Add a child span that has ended."""
        self.open(name, start_ns=start_ns, attributes=attributes).end(end_ns)

    def event(self, name: str, *, at_ns: int, attributes: Attributes | None = None) -> None:
        """Add an event to the span."""
        self._span.add_event(name, attributes=attributes, timestamp=at_ns)

    def note(self, attributes: Attributes) -> None:
        """Add attributes to the span."""
        self._span.set_attributes(attributes)

    def end(self, end_ns: int, *, error: str = "") -> None:
        """End the span, as failed if there is an ``error``. Nothing can be added afterwards."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


class ProcessTracer:
    """Makes the spans of a process. It is not the global provider, so that libraries add no spans of their own."""

    def __init__(self, settings: TracingSettings, *, role: str, instance_id: str) -> None:
        """``role`` and ``instance_id`` tell the processes of a cluster apart. Begins a thread, ended by ``close``.

        Raises:
            TracingUnavailableError: This machine cannot send spans, even if the one that started the cluster can.
        """
        check_available(settings)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        version = baton_version()
        resource = _resource(settings, role=role, instance_id=instance_id, version=version)
        self._provider = TracerProvider(resource=resource, sampler=_sampler(settings), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.traces_url)))
        self._tracer = self._provider.get_tracer(DEFAULT_SERVICE_NAME, version)
        self._closing: threading.Thread | None = None

    @property
    def resource(self) -> Mapping[str, object]:
        """The resource attributes that describe this process."""
        return self._provider.resource.attributes

    def serve(
        self, name: str, context: TraceContext, *, start_ns: int, attributes: Attributes | None = None
    ) -> OpenSpan | None:
        """Open a span for work that another process asked for with ``context``; None if it is not sampled."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {"traceparent": context.traceparent, "tracestate": context.tracestate}
        carrier = {name: value for name, value in headers.items() if value}
        parent = TraceContextTextMapPropagator().extract(carrier, Context())
        span = self._tracer.start_span(
            name, context=parent, kind=SpanKind.SERVER, start_time=start_ns, attributes=attributes
        )
        return OpenSpan(span, self._tracer) if span.is_recording() else None

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send unsent spans, for at most ``timeout_s``. Blocks; a second call waits again."""
        if self._closing is None:
            self._closing = threading.Thread(target=self._provider.shutdown, name=CLOSING_THREAD, daemon=True)
            self._closing.start()
        self._closing.join(timeout_s)


def make_tracer(settings: TracingSettings, *, role: str, instance_id: str) -> ProcessTracer | None:
    """The tracer of a process; None if no spans are wanted. OpenTelemetry is not loaded then.

    Raises:
        TracingUnavailableError: Spans are wanted, and cannot be sent.
    """
    return ProcessTracer(settings, role=role, instance_id=instance_id) if settings.is_on else None


def _sampler(settings: TracingSettings) -> Sampler | None:
    """The sampler; None lets the SDK use the environment's."""
    if settings.sample_ratio is None:
        return None
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    return ParentBasedTraceIdRatio(settings.sample_ratio)


def _resource(settings: TracingSettings, *, role: str, instance_id: str, version: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.instance.id": instance_id, "service.version": version, "baton.role": role})
    named = settings.service_name
    if named is None and str(resource.attributes["service.name"]).startswith(UNNAMED):
        named = DEFAULT_SERVICE_NAME
    return resource if named is None else resource.merge(Resource({"service.name": named}))
