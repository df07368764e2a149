"""Transactions and workers: a worker is killed, another takes over, and the right one answers."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logs import NoSyncFileSystem
from server.transactions.clients import Client, both
from server.transactions.conftest import NODES, SETTINGS, MakeDesk
from server.wire_client import Desk

from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.worker_cluster import WorkerCluster
from segmentlog.store import LogStore
from segmentlog.transactions.outcome import TransactionCompleter
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch, ServerTransactions

NONE = ErrorCode.NONE
PROTOCOLS = pytest.mark.parametrize("is_new", [False, True], ids=["old", "new"])


def killed_worker(path: Path, work: Callable[[Desk], Any]) -> str:
    """Run work in a worker that is killed during it or right after; return its report."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            store = LogStore(path, background=False, fs=NoSyncFileSystem())
            broker = Broker(store, WorkerCluster("c", NODES[:1], 1), SETTINGS, OpenAuthorizer())  # type: ignore[arg-type]
            work_told = work(Desk(broker))
            os.write(tell, str(work_told).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(tell)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it raised something, see stderr"
    text = os.read(told, 1 << 16).decode()
    os.close(told)
    return text


def die(*_: object, **__: object) -> None:
    """Kill this process, like kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


@PROTOCOLS
def test_what_is_open_outlives_its_worker(path: Path, make_desk: MakeDesk, is_new: bool) -> None:
    """The client continues at the next worker, and commits; no other process aborts it meanwhile."""

    def work(desk: Desk) -> str:
        client = Client(desk, is_new=is_new)
        assert client.begin() == client.write(b"before", b"it") == client.commit_offset(3) == NONE
        return f"{client.numbers.producer_id} {client.numbers.epoch}"

    producer_id, epoch = map(int, killed_worker(path, work).split())
    desk = make_desk()
    store = desk.broker.store
    for _ in range(3):
        store.finish_transactions()
    assert store.transactions.states()["app"].status == "Ongoing"
    assert both(desk) == []
    client = Client(desk, is_new=is_new)
    client.numbers = ProducerIdAndEpoch(producer_id, epoch)
    client.sequences["t", 0] = 2
    assert client.write(b"after") == NONE
    assert client.end() == NONE
    assert both(desk) == [b"before", b"it", b"after"]
    assert {one.offset for one in store.group_offsets.committed("g").values()} == {3}


@PROTOCOLS
@pytest.mark.parametrize("committed", [True, False])
def test_what_is_decided_is_finished(
    path: Path, make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, is_new: bool, committed: bool
) -> None:
    """The next process that checks finishes it; the client, which got no response, repeats the request and gets the
    outcome.
    """

    def work(desk: Desk) -> None:
        client = Client(desk, is_new=is_new)
        client.begin()
        client.write(b"a")
        monkeypatch.setattr(TransactionCompleter, "complete", die)
        client.end(committed=committed)

    killed_worker(path, work)
    desk = make_desk()
    store = desk.broker.store
    before = store.transactions.states()["app"]
    assert before.status == ("PrepareCommit" if committed else "PrepareAbort")
    store.finish_transactions()
    assert both(desk) == ([b"a"] if committed else [])
    client = Client(desk, is_new=is_new)
    client.numbers = ProducerIdAndEpoch(before.producer_id, before.last_epoch)
    assert client.end(committed=not committed) == ErrorCode.INVALID_TXN_STATE
    assert client.end(committed=committed) == NONE
    assert client.numbers.epoch == before.epoch


@PROTOCOLS
def test_a_decision_that_was_begun_is_begun_again(
    path: Path, make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Killed before it is on disk: the transaction is open, takes no more, and waits for its client."""

    def work(desk: Desk) -> None:
        client = Client(desk, is_new=is_new)
        client.begin()
        client.write(b"a")
        monkeypatch.setattr(ServerTransactions, "_sync", die)
        client.end()

    killed_worker(path, work)
    desk = make_desk()
    desk.broker.store.finish_transactions()
    state = desk.broker.store.transactions.states()["app"]
    assert state.status == "Ongoing"
    assert both(desk) == []
    client = Client(desk, is_new=is_new)
    client.numbers = ProducerIdAndEpoch(state.producer_id, state.last_epoch)
    assert client.write(b"late") in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.CONCURRENT_TRANSACTIONS)
    assert client.end() == NONE
    assert both(desk) == [b"a"]
    client.sequences.clear()
    if not is_new:
        client.sequences["t", 0] = 1
    assert client.write(b"b") == client.end() == NONE
    assert both(desk) == [b"a", b"b"]


def test_who_coordinates(make_desk: MakeDesk) -> None:
    """Each id has one worker; others redirect the client. With one worker fewer, the remaining one continues."""
    first, second = make_desk(1, workers=2), make_desk(2, workers=2)
    name = next(name for name in map(str, range(100)) if second.broker.cluster.is_coordinator(name))
    client = Client(first, name, is_new=True)
    assert client.begin() == ErrorCode.NOT_COORDINATOR
    assert client.add(0) == [ErrorCode.NOT_COORDINATOR]
    assert client.add_offsets() == client.end() == ErrorCode.NOT_COORDINATOR
    client.desk = second
    assert client.begin() == NONE
    topic = first.broker.store.topic("t")
    leaders = {number: (first if first.broker.cluster.leads(topic.id, number) else second) for number in (0, 1)}
    assert set(leaders.values()) == {first, second}
    for number, leader in leaders.items():
        client.desk = leader
        assert client.write(b"%d" % number, partition=number) == NONE
    client.desk = make_desk(1)
    assert client.end() == NONE
    assert [both(leaders[number], number) for number in (0, 1)] == [[b"0"], [b"1"]]
