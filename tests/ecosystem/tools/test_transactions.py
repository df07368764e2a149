"""kafka-transactions.sh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException, Producer
from ecosystem.tools.conftest import Command
from server.clients.driver import WAIT_S
from server.clients.served import Served

from segmentlog.store import LogStore

pytestmark = pytest.mark.xdist_group("tools")
TRANSACTIONS = "TransactionsCommand"


class Work:
    """A producer with a transaction open in topic t, of whose partitions it has written to the first."""

    def __init__(self, address: str) -> None:
        self._producers = [Producer({"bootstrap.servers": address, "transactional.id": "work"})]
        self._producers[0].init_transactions(WAIT_S)
        self._producers[0].begin_transaction()
        self._producers[0].produce("t", b"value", partition=0)
        self._producers[0].flush(WAIT_S)

    def commit(self) -> None:
        """Commit, and raise the error of the commit."""
        self._producers[0].commit_transaction(WAIT_S)

    def close(self) -> None:
        """Drop the producer: a producer of confluent-kafka ends with its last reference."""
        self._producers.clear()


@pytest.fixture
def work(served: Served, store: LogStore) -> Iterator[Work]:
    """Yield a producer at work."""
    store.create_topic("t", 2)
    work = Work(served.address)
    yield work
    work.close()


def rows(out: str) -> list[list[str]]:
    """Return the rows of a table without its head."""
    return [line.split() for line in out.splitlines()[1:]]


def test_told(work: Work, do: Command, refuse: Command) -> None:
    """The tool lists transactions by age and by name, describes what each has written, and finds none that hangs."""
    ((name, _, identity, state),) = rows(do(TRANSACTIONS, "list"))
    assert (name, state) == ("work", "Ongoing")
    assert len(rows(do(TRANSACTIONS, "list", "--duration-filter", 0))) == 1
    assert rows(do(TRANSACTIONS, "list", "--duration-filter", 1_000_000)) == []
    assert len(rows(do(TRANSACTIONS, "list", "--transactional-id-pattern", "w.*"))) == 1
    assert rows(do(TRANSACTIONS, "list", "--transactional-id-pattern", "x.*")) == []
    assert "INVALID_REGULAR_EXPRESSION" in refuse(TRANSACTIONS, "list", "--transactional-id-pattern", "(w|x)+")
    (told,) = rows(do(TRANSACTIONS, "describe", "--transactional-id", "work"))
    assert (told[1], told[2], told[4], told[-1]) == ("work", identity, "Ongoing", "t-0")
    said = refuse(TRANSACTIONS, "describe", "--transactional-id", "none")
    assert "`none` failed because the ID could not be found" in said
    (told,) = rows(do(TRANSACTIONS, "describe-producers", "--topic", "t", "--partition", 0))
    assert (told[0], told[-1]) == (identity, "0")
    assert rows(do(TRANSACTIONS, "describe-producers", "--topic", "t", "--partition", 1)) == []
    assert rows(do(TRANSACTIONS, "find-hanging", "--topic", "t", "--max-transaction-timeout", 0)) == []


@pytest.mark.parametrize(
    ("how", "state"),
    [
        (("abort", "--topic", "t", "--partition", 0, "--start-offset", 0), "CompleteAbort"),
        (("forceTerminateTransaction", "--transactionalId", "work"), "Empty"),
    ],
    ids=["abort", "terminate"],
)
def test_ended(how: tuple[object, ...], state: str, work: Work, do: Command, store: LogStore) -> None:
    """Aborted by its partition or by its name: the producer is fenced, and readers get none of its records."""
    do(TRANSACTIONS, *how)
    ((_, _, _, found),) = rows(do(TRANSACTIONS, "list"))
    assert found == state
    assert rows(do(TRANSACTIONS, "list", "--duration-filter", 0)) == []
    assert list(store.consumer("t", isolation="read_committed")) == []
    with pytest.raises(KafkaException):
        work.commit()
