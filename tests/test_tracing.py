"""Traces continue through a topic: producers write headers, and consumers read them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aio_helpers import run
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, TraceState

import segmentlog
from segmentlog import tracing
from segmentlog.errors import InvalidConfig
from segmentlog.producing.producer import Producer
from segmentlog.records import Record
from segmentlog.store import LogStore


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans that came to their end; a tracer provider is set for the test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a new store with a topic."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t")
        yield store


def _records(store: LogStore) -> list[Record]:
    with store.consumer("t") as consumer:
        return list(consumer)


def _header_of(span: Any) -> bytes:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


def test_records_carry_the_span_they_are_sent_in(store: LogStore, exported: InMemorySpanExporter) -> None:
    """Records sent within a span carry it after their own headers, sent one by one or as lists; others carry none."""
    with store.producer() as producer:
        producer.send("t", b"before")
        with trace.get_tracer("test").start_as_current_span("work") as span:
            producer.send("t", b"a", headers=[("own", b"1")])
            producer.send("t", b"b")
            producer.send_many("t", [b"c", b"d"], headers=[[("own", b"2")], None])
            producer.send_many("t", [b"e"])
            producer.send("t", b"f", headers=[("traceparent", b"another")])
        producer.send("t", b"after")
    traced = ("traceparent", _header_of(span))
    assert [record.headers for record in _records(store)] == [
        (), (("own", b"1"), traced), (traced,), (("own", b"2"), traced), (traced,), (traced,),
        (("traceparent", b"another"),), (),
    ]  # fmt: skip
    assert [span.name for span in exported.get_finished_spans()] == ["work"]


def test_state_and_sampling_go_along(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsampled span is marked as such and its trace continues; a tracestate is a header, too."""
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with store.producer() as producer, provider.get_tracer("test").start_as_current_span("work") as span:
        producer.send("t", b"a")
        context = span.get_span_context()
        other = trace.SpanContext(
            context.trace_id, context.span_id + 1, False, context.trace_flags, TraceState([("vendor", "x")])
        )
        with trace.use_span(trace.NonRecordingSpan(other)):
            producer.send("t", b"b")
    first, second = _records(store)
    assert first.headers == (("traceparent", _header_of(span)),)
    assert not context.trace_flags.sampled
    assert second.headers[1] == ("tracestate", b"vendor=x")
    found = trace.get_current_span(tracing.context_of(second)).get_span_context()
    assert (found.trace_id, found.span_id, found.is_remote) == (context.trace_id, context.span_id + 1, True)
    assert found.trace_state.get("vendor") == "x"


def test_a_consumer_goes_on_with_the_trace(store: LogStore, exported: InMemorySpanExporter) -> None:
    """The consumer's span is a child of the sender's, or linked to it; a span of several records has links."""
    tracer = trace.get_tracer("test")
    with store.producer() as producer:
        for number in range(2):
            with tracer.start_as_current_span(f"send {number}"):
                producer.send("t", b"%d" % number)
                producer.send("t", b"%d" % number)
        producer.send("t", b"alone")
    records = _records(store)
    with tracing.processing(records[0], group="g"), tracer.start_as_current_span("inner"):
        pass
    with tracer.start_as_current_span("outer"), tracing.processing(records[2], in_its_trace=False):
        pass
    with tracing.processing(records[4]):
        pass
    with tracing.processing_many(records, group="g"):
        pass
    assert tracing.link_of(records[4]) is None
    spans = exported.get_finished_spans()
    by_name = {span.name: span for span in spans}
    linked, apart, alone, many = [span for span in spans if span.name == "process t"]
    assert linked.kind is SpanKind.CONSUMER
    assert linked.parent is not None
    assert linked.parent.span_id == by_name["send 0"].context.span_id
    assert linked.context.trace_id == by_name["send 0"].context.trace_id == by_name["inner"].context.trace_id
    assert linked.attributes == {
        "messaging.system": "segmentlog", "messaging.operation.name": "process", "messaging.operation.type": "process",
        "messaging.destination.name": "t", "messaging.destination.partition.id": "0", "messaging.kafka.offset": 0,
        "messaging.consumer.group.name": "g",
    }  # fmt: skip
    assert apart.parent is not None
    assert apart.parent.span_id == by_name["outer"].context.span_id
    assert [link.context.span_id for link in apart.links] == [by_name["send 1"].context.span_id]
    assert alone.parent is None
    assert not alone.links
    assert [link.context.span_id for link in many.links] == [by_name[f"send {n}"].context.span_id for n in range(2)]
    assert many.attributes["messaging.batch.message_count"] == 5


def test_sends_can_be_spans(store: LogStore, exported: InMemorySpanExporter) -> None:
    """With ``tracing="spans"``, records carry these spans, and a failure is recorded."""
    with store.producer(tracing="spans") as producer:
        producer.send("t", b"a")
        producer.send_many("t", [b"b", b"c"])
        with pytest.raises(segmentlog.UnknownTopic):
            producer.send("none", b"x")
    one, many, failed = exported.get_finished_spans()
    assert (one.name, one.kind) == ("send t", SpanKind.PRODUCER)
    assert many.attributes is not None
    assert many.attributes["messaging.batch.message_count"] == 2
    assert many.attributes["messaging.operation.type"] == "send"
    assert not failed.status.is_ok
    spans = [int.from_bytes(bytes.fromhex(record.headers[0][1].split(b"-")[2].decode())) for record in _records(store)]  # type: ignore[union-attr]
    assert spans == [one.context.span_id, many.context.span_id, many.context.span_id]


def test_asyncio(store: LogStore, exported: InMemorySpanExporter) -> None:
    """Each task's span is that of its records, also of lists, which threads send."""

    async def send(producer: Any, name: str) -> bytes:
        with trace.get_tracer("test").start_as_current_span(name) as span:
            await producer.send("t", name.encode())
            await asyncio.sleep(0.001)
            await producer.send_many("t", [name.encode()] * 2)
            return _header_of(span)

    async def work() -> list[bytes]:
        async with store.aproducer() as producer:
            return await asyncio.gather(*(send(producer, name) for name in ("x", "y")))

    of_x, of_y = run(work())
    assert of_x != of_y
    records = _records(store)
    assert len(records) == 6
    for record in records:
        assert record.headers == (("traceparent", of_x if record.value == b"x" else of_y),)


def test_nothing_is_done_without_a_provider(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer is the plain one; so it is with "off". A wrong word is refused."""
    with store.producer() as producer:
        assert type(producer) is Producer
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: TracerProvider(shutdown_on_exit=False))
    with store.producer() as producer:
        assert type(producer) is not Producer
    with store.producer(tracing="off") as producer:
        assert type(producer) is Producer
    with pytest.raises(InvalidConfig, match="'auto', 'headers', 'spans' or 'off'"):
        store.producer(tracing="on")  # type: ignore[call-overload]


def test_what_is_no_trace_is_none(store: LogStore) -> None:
    """Headers that say what they please raise nothing."""
    for value in (b"\xff", b"00-0-0-00", None):
        record = Record("t", 0, 0, 0, None, b"", (("traceparent", value),), 0)
        assert tracing.link_of(record) is None


_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import segmentlog
with segmentlog.open(sys.argv[1]) as store:
    store.create_topic("t")
    with store.producer() as producer:
        producer.send("t", b"a")
    try:
        store.producer(tracing="headers")
    except segmentlog.InvalidConfig as error:
        print(error)
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""


def test_without_the_package(tmp_path: Path) -> None:
    """Without OpenTelemetry the package loads, and an error says how to install it."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(tmp_path / "s")], capture_output=True, text=True, check=True
    )
    assert "pip install '.[otel]' in a clone of segmentlog" in done.stdout
