"""Traces that go on through a topic, by OpenTelemetry: which trace a record is of travels in its headers.

    store.producer()                                  # adds traceparent and tracestate (W3C) to what a span sends
    with tracing.processing(record): ...              # a span of the same trace, around what a consumer does with it

Nothing of OpenTelemetry is loaded unless the program did so itself, or asks for it. Extra: ``otel``.
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
"""What a producer does about traces.

auto     "headers", if a tracer provider was set before the producer is made; else "off"
headers  records that are sent within a span carry its context: 70 bytes each before compression, more with a tracestate
spans    the same, and each `send` and `send_many` is a span of its own
off      nothing
"""

_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
_LINKS_MAX: Final = 128


class Carrier:
    """What a producer adds to headers. Thread-safe."""

    def __init__(self, *, makes_spans: bool) -> None:
        self._trace = _api()
        self._makes_spans = makes_spans
        self._last: tuple[Any, Headers] = (None, ())

    def headers(self) -> Headers:
        """Those of the span that is current, for one record; none without a span."""
        context = self._trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ()
        last, headers = self._last
        if last is not context:
            # As `TraceContextTextMapPropagator` writes it.
            text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
            fields = [(_PARENT, text.encode())]
            if context.trace_state:
                fields.append((_STATE, context.trace_state.to_header().encode()))
            headers = tuple(fields)
            self._last = context, headers
        return headers

    def added(self, headers: Sequence[tuple[str, bytes | None]] | None) -> Sequence[tuple[str, bytes | None]] | None:
        """A record's headers with those of the span, unless they have some already."""
        of_span = self.headers()
        if not of_span:
            return headers
        if not headers:
            return of_span
        return headers if any(name == _PARENT for name, _ in headers) else (*headers, *of_span)

    def added_to_all(
        self, headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None, count: int
    ) -> Sequence[Sequence[tuple[str, bytes | None]] | None] | None:
        """The same for a list of records."""
        of_span = self.headers()
        if not of_span:
            return headers
        return [of_span] * count if headers is None else [self.added(one) for one in headers]

    def sending(self, topic: str, count: int) -> contextlib.AbstractContextManager[object]:
        """A span around a call that sends, if there is to be one."""
        if not self._makes_spans:
            return contextlib.nullcontext()
        span: contextlib.AbstractContextManager[object] = _tracer().start_as_current_span(
            f"send {topic}", kind=self._trace.SpanKind.PRODUCER, attributes=_attributes("send", topic, count)
        )
        return span


def carrier_of(tracing: Tracing) -> Carrier | None:
    """What a producer adds; None for nothing. Raises `InvalidConfig`, also without OpenTelemetry where it is needed."""
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
    """The context that a record was sent in, for `start_span`; one without a span if it carries none."""
    _api()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(_fields_of(record.headers))


def link_of(record: Record[Any, Any]) -> Link | None:
    """A link to the span that a record was sent in; None if it carries none."""
    trace = _api()
    context = trace.get_current_span(context_of(record)).get_span_context()
    return trace.Link(context) if context.is_valid else None


def processing(
    record: Record[Any, Any], *, group: str | None = None, in_its_trace: bool = True
) -> contextlib.AbstractContextManager[Span]:
    """A span ``process TOPIC`` around what is done with one record, which then is current.

    A child of the span that the record was sent in, with a link to it; with ``in_its_trace=False``, or for a record
    that carries none, a child of the current one.
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
    """One span around what is done with several records of a topic, with links to the spans they were sent in.

    A child of the current span. No more than 128 different links.
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
    """By the semantic conventions for messaging."""
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
        wanted = f"'auto' or 'off' without the package opentelemetry-api ({install})"
        raise InvalidConfig("tracing", "on", wanted) from error
