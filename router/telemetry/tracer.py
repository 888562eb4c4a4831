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
"""What the SDK calls a service that nobody named begins so."""

CLOSE_TIMEOUT_S = 3.0
"""How long the end of a process waits for what was not sent yet."""


class OpenSpan:
    """A span that goes on. Times are nanoseconds of the wall clock, so that spans may be made when all is over."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, span: Span, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer

    @property
    def trace_id(self) -> str:
        """As it is written in headers and shown by collectors."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def context(self) -> TraceContext:
        """What a process needs to make spans inside of this one."""
        context = self._span.get_span_context()
        traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        return TraceContext(traceparent=traceparent, tracestate=context.trace_state.to_header())

    def open(
        self, name: str, *, start_ns: int, kind: Kind = "internal", attributes: Attributes | None = None
    ) -> OpenSpan:
        """A span inside of this one."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        inside = set_span_in_context(self._span)
        span = self._tracer.start_span(
            name, context=inside, kind=SpanKind[kind.upper()], start_time=start_ns, attributes=attributes
        )
        return OpenSpan(span, self._tracer)

    def add(self, name: str, *, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """A span inside of this one that is over."""
        self.open(name, start_ns=start_ns, attributes=attributes).end(end_ns)

    def event(self, name: str, *, at_ns: int, attributes: Attributes | None = None) -> None:
        """Something that happened in it."""
        self._span.add_event(name, attributes=attributes, timestamp=at_ns)

    def note(self, attributes: Attributes) -> None:
        """Say more of it."""
        self._span.set_attributes(attributes)

    def end(self, end_ns: int, *, error: str = "") -> None:
        """It is over, and failed where there is an ``error``. Nothing more can be said of it."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


class ProcessTracer:
    """Makes the spans of a process. It is no global one: libraries that make spans for such make none by it."""

    def __init__(self, settings: TracingSettings, *, role: str, instance_id: str) -> None:
        """``role`` and ``instance_id`` tell the processes of a cluster apart. Begins a thread, ended by ``close``.

        Raises:
            TracingUnavailableError: This machine cannot, whatever the one could that the cluster was started from.
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
        """What is told of this process with its spans."""
        return self._provider.resource.attributes

    def serve(
        self, name: str, context: TraceContext, *, start_ns: int, attributes: Attributes | None = None
    ) -> OpenSpan | None:
        """A span of what this process does for another one, which sent ``context``; None where it is not sampled."""
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
        """Send what was not sent yet, for a while. Blocks; called again, it waits on."""
        if self._closing is None:
            self._closing = threading.Thread(target=self._provider.shutdown, name="baton-spans-close", daemon=True)
            self._closing.start()
        self._closing.join(timeout_s)


def make_tracer(settings: TracingSettings, *, role: str, instance_id: str) -> ProcessTracer | None:
    """What makes a process's spans; None where none are wanted, and nothing of OpenTelemetry is loaded.

    Raises:
        TracingUnavailableError: Some are wanted, and cannot be sent.
    """
    return ProcessTracer(settings, role=role, instance_id=instance_id) if settings.is_on else None


def _sampler(settings: TracingSettings) -> Sampler | None:
    """None lets the SDK go by the environment."""
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
