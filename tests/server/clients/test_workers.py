"""Each client at `segmentlog serve` with several workers, of which one is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from server.clients.driver import Driver, Sent, sorted_records
from server.clients.served import Served
from server.clients.served import served as served
from server.clients.served import store as store
from waiting import wait_until

from segmentlog.store import LogStore

_START_MS = round(time.time() * 1000) - 60_000  # not yet for retention to remove
_PARTITIONS = 6


@pytest.mark.long
def test_several_brokers(kind: type[Driver], served: Served, store: LogStore) -> None:
    """Partitions and groups are spread over workers: a client finds its way, also when one of them was killed."""
    client = kind(served.address)
    if client.has_admin:
        client.create("t", _PARTITIONS, {})
        wait_until(lambda: store.topic("t").partition_count == _PARTITIONS)
    else:
        store.create_topic("t", partitions=_PARTITIONS)
    records = [
        Sent(number % _PARTITIONS, b"k%d" % number, b"v%d" % number, _START_MS + number)
        for number in range(2 * _PARTITIONS)
    ]
    client.write("t", records)
    assert len(client.read("t", len(records))) == len(records)
    first = client.consume("g", "t", 5)
    os.kill(served.workers()[1], signal.SIGKILL)
    client.write("t", records, idempotent=True)
    rest = client.consume("g", "t", 4 * _PARTITIONS - 5)
    read = sorted_records(first + rest)
    assert [(one.partition, one.offset) for one in read] == [
        (partition, offset) for partition in range(_PARTITIONS) for offset in range(4)
    ]
    assert sorted_records(client.read("t", len(read))) == read
    wait_until(lambda: len(served.workers()) == 3, "the worker was not started again")
    if client.has_admin:
        assert client.lag("g", "t") == dict.fromkeys(range(_PARTITIONS), 0)
        for partition in range(_PARTITIONS):
            client.trim("t", partition, 1)
        assert len(client.read("t", 3 * _PARTITIONS)) == 3 * _PARTITIONS
        assert client.at_time("t", 1, _START_MS + 2) == 1
        client.delete("t")
        assert store.topics() == []
        if client.deletes_groups:
            client.delete_group("g")
            assert store.groups.names() == []
