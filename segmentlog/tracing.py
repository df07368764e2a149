"""OpenTelemetry traces across a topic: record headers carry the trace context.

    store.producer()                                  # in a span, adds traceparent and tracestate (W3C) to records
    with tracing.processing(record): ...              # a span of the same trace around the consumer's work

OpenTelemetry is not imported unless the program has imported it or requests it. Extra: ``otel``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from segmentlog.errors import InvalidConfig
from segmentlog.records import Headers

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span

    from segmentlog.records import Record

Tracing = Literal["auto", "headers", "spans", "off"]
"""Trace mode of a producer.

auto     "headers" if a tracer provider was set before the producer is created, otherwise "off"
headers  records sent within a span carry its context: 70 bytes each before compression, more with a tracestate
spans    the same, and each `send` and `send_many` is a span of its own
off      no headers and no spans
"""

_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
_LINKS_MAX: Final = 128


class Carrier:
    """Adds trace context to headers of a producer. Thread-safe."""

    def __init__(self, *, makes_spans: bool) -> None:
        self._trace = _api()
        self._makes_spans = makes_spans
        self._last: tuple[Any, Headers] = (None, ())

    def headers(self) -> Headers:
        """Return the headers with the context of the current span; empty if there is no span."""
        context = self._trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ()
        last, headers = self._last
        if last is not context:
            # in the format of `TraceContextTextMapPropagator`
            text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
            fields = [(_PARENT, text.encode())]
            if context.trace_state:
                fields.append((_STATE, context.trace_state.to_header().encode()))
            headers = tuple(fields)
            self._last = context, headers
        return headers

    def added(self, headers: Sequence[tuple[str, bytes | None]] | None) -> Sequence[tuple[str, bytes | None]] | None:
        """Return a record's headers, with those of the current span unless they have trace context already."""
        of_span = self.headers()
        if not of_span:
            return headers
        if not headers:
            return of_span
        return headers if any(name == _PARENT for name, _ in headers) else (*headers, *of_span)

    def added_to_all(
        self, headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None, count: int
    ) -> Sequence[Sequence[tuple[str, bytes | None]] | None] | None:
        """Return the headers of a list of records, each with those of the current span."""
        of_span = self.headers()
        if not of_span:
            return headers
        return [of_span] * count if headers is None else [self.added(own) for own in headers]

    def sending(self, topic: str, count: int) -> contextlib.AbstractContextManager[object]:
        """Return a context with a span for a call that sends; without a span if spans are off."""
        if not self._makes_spans:
            return contextlib.nullcontext()
        span: contextlib.AbstractContextManager[object] = _tracer().start_as_current_span(
            f"send {topic}", kind=self._trace.SpanKind.PRODUCER, attributes=_attributes("send", topic, count)
        )
        return span


def carrier_of(tracing: Tracing) -> Carrier | None:
    """Return the carrier for a trace mode; None if traces are off.

    Raises `InvalidConfig` for an invalid mode, or if OpenTelemetry is not installed.
    """
    if not isinstance(tracing, str) or tracing not in ("auto", "headers", "spans", "off"):
        raise InvalidConfig("tracing", tracing, "'auto', 'headers', 'spans' or 'off'")
    if tracing == "off":
        return None
    if tracing == "auto":
        api = sys.modules.get("opentelemetry.trace")
        if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
            return None
    return Carrier(makes_spans=tracing == "spans")


def context_of(record: Record[Any, Any]) -> Context:
    """Return the trace context that a record's headers carry, for `start_span`; empty if they carry none."""
    _api()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(_fields_of(record.headers))


def link_of(record: Record[Any, Any]) -> Link | None:
    """Return a link to the span in which a record was sent; None if its headers carry no trace context."""
    trace = _api()
    context = trace.get_current_span(context_of(record)).get_span_context()
    return trace.Link(context) if context.is_valid else None


def processing(
    record: Record[Any, Any], *, group: str | None = None, in_its_trace: bool = True
) -> contextlib.AbstractContextManager[Span]:
    """Return a span ``process TOPIC`` for the processing of one record; it is the current span within the context.

    The parent of the new span is the span in which the record was sent, and the new span has a link to it. With
    ``in_its_trace=False``, or for a record without trace context, the parent is the current span.
    """
    trace = _api()
    link = link_of(record)
    attributes = _attributes("process", record.topic, None) | {
        "messaging.destination.partition.id": str(record.partition),
        "messaging.kafka.offset": record.offset,
    }
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    span: contextlib.AbstractContextManager[Span] = _tracer().start_as_current_span(
        f"process {record.topic}", context=context_of(record) if in_its_trace and link is not None else None,
        kind=trace.SpanKind.CONSUMER, links=[] if link is None else [link], attributes=attributes,
    )  # fmt: skip
    return span


@contextlib.contextmanager
def processing_many(records: Iterable[Record[Any, Any]], *, group: str | None = None) -> Iterator[Span]:
    """Yield one span for the processing of several records of a topic, with links to the spans of the records.

    The parent of the new span is the current span. The new span has at most 128 different links.
    """
    trace = _api()
    count, topic = 0, ""
    links: dict[tuple[int, int], Link] = {}
    for record in records:
        count, topic = count + 1, record.topic
        if len(links) < _LINKS_MAX and (link := link_of(record)) is not None:
            links.setdefault((link.context.trace_id, link.context.span_id), link)
    attributes = _attributes("process", topic, count)
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    with _tracer().start_as_current_span(
        f"process {topic}", kind=trace.SpanKind.CONSUMER, links=list(links.values()), attributes=attributes
    ) as span:
        yield span


def _fields_of(headers: Headers) -> Mapping[str, str]:
    return {
        name: value.decode("ascii", "replace")
        for name, value in headers
        if name in (_PARENT, _STATE) and value is not None
    }


def _attributes(operation: str, topic: str, count: int | None) -> dict[str, Any]:
    """Return span attributes according to OpenTelemetry's semantic conventions for messaging."""
    attributes: dict[str, Any] = {
        "messaging.system": "segmentlog",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    if count is not None:
        attributes["messaging.batch.message_count"] = count
    return attributes


def _tracer() -> Any:
    return _api().get_tracer("segmentlog")


def _api() -> Any:
    try:
        return importlib.import_module("opentelemetry.trace")
    except ImportError as error:
        install = "pip install '.[otel]' in a clone of segmentlog"
        message = f"install the package opentelemetry-api ({install}), or use 'auto' or 'off'"
        raise InvalidConfig("tracing", "on", message) from error
