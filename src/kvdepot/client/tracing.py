"""OpenTelemetry: one span per lookup, store or retrieve, in the trace of its request.

`adapter.watch = Spans()` turns it on; the vLLM connector does so if vLLM traces (`--otlp-traces-endpoint`), with each
request's trace headers. The process's tracer provider decides where spans go. Needs the extra `otel`; without it,
nothing imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvdepot import __version__
from kvdepot.client.operation import Operation

__all__ = ["Spans"]


def _no_headers(request: str) -> Mapping[str, str] | None:
    return None


class Spans:
    """Makes spans from operations: `kvdepot.lookup`, `kvdepot.store`, `kvdepot.retrieve`."""

    def __init__(
        self,
        provider: trace.TracerProvider | None = None,
        headers: Callable[[str], Mapping[str, str] | None] = _no_headers,
    ) -> None:
        """provider: None: the process's own. headers: returns the W3C trace headers of a request, by its id."""
        self._tracer = trace.get_tracer("kvdepot", __version__, provider)
        self._headers = headers
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, operation: Operation) -> None:
        """Make a span of an ended operation; one in each request's trace if it was for several."""
        attributes: dict[str, int | str] = {
            "kvdepot.chunks": operation.chunks,
            "kvdepot.chunks_done": operation.done,
            "kvdepot.size_bytes": operation.size_bytes,
            "kvdepot.requests": len(operation.requests),
        }
        ended_ns = operation.began.wall_ns + int(operation.took_s * 1e9)
        for request in operation.requests:
            headers = self._headers(request)
            span = self._tracer.start_span(
                f"kvdepot.{operation.kind}",
                context=self._propagator.extract(headers) if headers else None,
                kind=trace.SpanKind.CLIENT,
                attributes=attributes | {"gen_ai.request.id": request},
                start_time=operation.began.wall_ns,
            )
            if (error := operation.error) is not None:
                span.set_status(trace.StatusCode.ERROR, f"{error.code}: {error}")
            span.end(ended_ns)
