"""A collector of OpenTelemetry spans: receives OTLP over HTTP on a free port, and stores what arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A received span. Ids are hexadecimal; ``parent_id`` is empty if there is none."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    error: str | None
    resource: dict[str, Any]

    @property
    def role(self) -> str:
        """The role of the process that made the span."""
        return str(self.resource["baton.role"])


@dataclass(slots=True)
class Collector:
    """The received spans; ``path`` is the path of the last request. ``begin`` makes it listen."""

    url: str
    begin: Callable[[], None]
    spans: list[Collected] = field(default_factory=list)
    path: str = ""
    _came: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: ExportTraceServiceRequest, path: str) -> None:
        """Store the spans of a request."""
        with self._came:
            self.path = path
            for of_resource in request.resource_spans:
                resource = _values(of_resource.resource.attributes)
                for scope in of_resource.scope_spans:
                    self.spans += [_collected(span, resource) for span in scope.spans]
            self._came.notify_all()

    def of_trace(self, trace_id: str) -> list[Collected]:
        """The spans of a trace."""
        with self._came:
            return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, is_complete: Callable[[list[Collected]], bool]) -> list[Collected]:
        """The spans of a trace, once they are complete."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._came:
            while not is_complete(spans := [span for span in self.spans if span.trace_id == trace_id]):
                if not self._came.wait(deadline_s - time.monotonic()):
                    raise AssertionError(f"only {[(span.role, span.name) for span in spans]} of {trace_id}")
        return spans


@contextmanager
def running_collector(*, is_away: bool = False) -> Iterator[Collector]:
    """A collector that listens on the loopback address; if it ``is_away``, only once it is told to ``begin``.

    Until then connections to its port are refused, and no other process can have the port.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body), self.path)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False) as server:
        server.server_bind()
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})

        def begin() -> None:
            server.server_activate()
            serving.start()

        collector = Collector(url=f"http://127.0.0.1:{server.server_address[1]}", begin=begin)
        if not is_away:
            begin()
        try:
            yield collector
        finally:
            if serving.is_alive():
                server.shutdown()
                serving.join()


def _collected(span: Span, resource: dict[str, Any]) -> Collected:
    return Collected(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
        resource=resource,
    )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
