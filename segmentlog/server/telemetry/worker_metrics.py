"""Metrics of a worker: its counters, its waiting requests, and its process. Prometheus' client library writes them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.telemetry import definitions
from segmentlog.server.worker_counters import BUCKETS_S, Event
from segmentlog.speedups import COMPILED

if TYPE_CHECKING:
    from segmentlog.server.telemetry.definitions import Family
    from segmentlog.server.worker import KafkaWorker

_EDGES: Final = [*(str(bound) for bound in BUCKETS_S), "+Inf"]


class WorkerTelemetry:
    """Metrics of a worker. Thread-safe."""

    def __init__(self, worker: KafkaWorker, version: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_WorkerCollector(worker, version))
        ProcessCollector(registry=self._registry)

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _WorkerCollector(Collector):
    def __init__(self, worker: KafkaWorker, version: str) -> None:
        self._worker = worker
        self._version = version

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics in `definitions.WORKER`."""
        worker, broker, meter = self._worker, self._worker.broker, self._worker.broker.meter
        build = self._version, platform.python_version(), "compiled" if COMPILED else "interpreted"
        yield _metric(definitions.BUILD_INFO, {(*build, str(broker.broker_id)): 1})
        yield self._latencies()
        errors = {(api, _name_of(code)): count for (api, code), count in meter.error_counts().items()}
        yield _metric(definitions.ERRORS, errors)
        yield _metric(definitions.CONNECTIONS, worker.listener.connection_count)
        yield _metric(definitions.ACCEPTED, meter.count_of(Event.ACCEPTED))
        yield _metric(definitions.REFUSED, meter.count_of(Event.REFUSED))
        yield _metric(definitions.CUT, meter.count_of(Event.CUT))
        yield _metric(
            definitions.AUTHENTICATION_FAILURES,
            {("tls",): meter.count_of(Event.TLS_FAILED), ("sasl",): meter.count_of(Event.SASL_FAILED)},
        )
        received, sent = worker.listener.traffic()
        yield _metric(definitions.RECEIVED, received)
        yield _metric(definitions.SENT, sent)
        yield _metric(definitions.FETCH_SESSIONS, len(broker.fetch_sessions))
        yield _metric(definitions.LONG_POLLS, broker.purgatory.waiting_count)
        waits = {broker.fsync_waiter, broker.ack_waiter}
        yield _metric(definitions.WAITING_FOR_DISK, sum(one.waiting_count for one in waits))
        converted_batches = broker.converted_batches
        yield _metric(
            definitions.RENDERED, {("hit",): converted_batches.hit_count, ("miss",): converted_batches.miss_count}
        )
        yield _metric(definitions.RENDERED_BYTES, converted_batches.disk_bytes)
        yield _metric(definitions.OPENED, len(broker.store.opened_partitions()))
        yield _metric(definitions.PROBLEMS, len(worker.problems()))
        shipping = broker.store.shipping.status()
        if shipping is not None and shipping.is_owner:
            yield _metric(definitions.SHIP_SECONDS, shipping.lag_s)
            yield _metric(definitions.SHIP_BYTES, shipping.lag_bytes)
            yield _metric(definitions.SHIP_FAILING, int(bool(shipping.error)))

    def _latencies(self) -> Metric:
        family = definitions.REQUEST_SECONDS
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for api, (buckets, seconds) in self._worker.broker.meter.apis().items():
            metric.add_metric([api], list(zip(_EDGES, accumulate(buckets), strict=True)), seconds)
        return metric


def _metric(family: Family, values: float | Mapping[Any, float]) -> Metric:
    """Return a metric with one value, or one for each of the labels."""
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
        metric.add_metric(labels, value)
    return metric


def _name_of(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)
