"""Rejected records of a batch: the client learns their indices (KIP-467), and can send the others again."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, Producer
from server.clients.driver import WAIT_S

from segmentlog.log.append import wire_append
from segmentlog.store import LogStore
from segmentlog.testing.pytest_plugin import ServerOfTests

_KEYS = [b"a", None, b"b", None, b"c", None]


def codes_of(server: ServerOfTests) -> list[int]:
    """Return the outcome of each record of a batch."""
    told: dict[int, int] = {}
    producer = Producer({"bootstrap.servers": server.bootstrap_servers, "linger.ms": 1000, "retries": 0})
    for number, key in enumerate(_KEYS):

        def note(error: KafkaError | None, _: object, number: int = number) -> None:
            told[number] = error.code() if error else KafkaError.NO_ERROR

        producer.produce("t", b"v", key=key, partition=0, on_delivery=note)
    assert producer.flush(WAIT_S) == 0
    return [told[number] for number in range(len(_KEYS))]


def test_records_without_a_key_are_named(server: ServerOfTests, store: LogStore) -> None:
    """In a compacted topic each of them is invalid; the other records are only in the same batch."""
    store.create_topic("t", cleanup_policy="compact")
    bad, other = KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD
    assert codes_of(server) == [other, bad, other, bad, other, bad]
    assert store.topic("t").partition(0).log_end_offset == 0


def test_not_more_are_named_than_an_answer_takes(
    server: ServerOfTests, store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them: a batch may hold millions."""
    monkeypatch.setattr(wire_append, "NAMED_MAX", 2)
    store.create_topic("t", cleanup_policy="compact")
    bad, other = KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD
    assert codes_of(server) == [other, bad, other, bad, other, other]
