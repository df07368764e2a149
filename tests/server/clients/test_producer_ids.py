"""A real idempotent client uses its producer id across restarts of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer
from server.clients.driver import WAIT_S

import segmentlog
from segmentlog.format.file_names import PRODUCER_IDS_FILE


def _producer(address: str) -> Producer:
    return Producer({
        "bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 0, "log_level": 0,
        "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100,
    })  # fmt: skip


def _send(producer: Producer, value: bytes) -> int | None:
    """Produce one record; the code of the error, None when it was delivered."""
    told: list[KafkaError | None] = []

    def note(error: KafkaError | None, message: Message) -> None:
        told.append(error)

    producer.produce("t", value, callback=note)
    assert producer.flush(WAIT_S) == 0
    (error,) = told
    return None if error is None else error.code()


@pytest.mark.long
def test_a_client_keeps_its_id_over_restarts_and_is_told_when_that_is_unknown(tmp_path: Path) -> None:
    """It continues after a restart. If the store has lost the proof of its id, it fails, and a new producer works."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
    options: dict[str, Any] = {}
    producers: list[Producer] = []
    for lives in range(3):
        if lives == 2:
            (tmp_path / "store" / PRODUCER_IDS_FILE).unlink()
        with segmentlog.serve(tmp_path / "store", **options) as server:
            address = server.bootstrap_servers
            options["port"] = int(address.rpartition(":")[2])
            producers = producers or [_producer(address)]
            if lives < 2:
                assert _send(producers[0], b"%d" % lives) is None
            else:
                assert _send(producers[0], b"lost") == KafkaError.INVALID_PRODUCER_ID_MAPPING
                assert _send(_producer(address), b"2") is None
    with segmentlog.open(tmp_path / "store", read_only=True) as store:
        assert [record.value for record in store.consumer("t")] == [b"0", b"1", b"2"]
