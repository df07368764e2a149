"""A batch whose checksum is right and whose records do not decode: readers name it, and read what is around it."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from broken import command, flip
from doors import Client
from leftovers import opened
from logs import NoSyncFileSystem, contents, open_log, values
from server.wire_client import WireClient
from unreadable import COUNT, KINDS, NOW_MS, ONE_OF_EACH, REMEDY, append_around, append_unreadable
from wire import Sent, append_sent, encoded, foreign, forged

import segmentlog
from segmentlog import AsyncConsumer, CorruptBatch, UnreadableBatch, text_codec
from segmentlog.errors import SegmentlogError
from segmentlog.http.context import HttpContext
from segmentlog.http.serving import HttpServer
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import TopicPartition
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry import SchemaRegistry
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

every_kind = pytest.mark.parametrize("kind", KINDS)
each_layout = pytest.mark.parametrize("kind", ONE_OF_EACH)


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store with an empty topic t."""
    made = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    made.create_topic("t")
    return made


def check(error: UnreadableBatch, log: Partition) -> None:
    """Check that the error names the offsets [1, 4) of the batch, the reason, and the remedy."""
    assert (error.offset, error.next_offset, error.record_count) == (1, 1 + COUNT, COUNT)
    if error.path:
        assert Path(error.path).parent == Path(log.folder)
        (position,) = (batch._position for batch in log.read(1, 1))
        assert error.position == position > 0
    text = str(error)
    assert f"offsets [1, {1 + COUNT}), {COUNT} records" in text
    assert f"Continue at offset {1 + COUNT}" in text
    assert REMEDY in text
    assert error.reason in text
    assert "damaged" not in text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.args, type(again)) == (text, error.args, UnreadableBatch)


# ---------------------------------------------------------------- the library


@every_kind
def test_reading_raises_an_error_of_its_own(tmp_path: Path, kind: str) -> None:
    """Whichever column is asked for first; reading continues at the offset that the error names."""
    log = open_log(tmp_path)
    append_around(log, kind)
    found = list(log.read(0))
    assert [(batch.base_offset, batch.next_offset, len(batch)) for batch in found] == [(0, 1, 1), (1, 4, 3), (4, 5, 1)]
    with pytest.raises(UnreadableBatch) as caught:
        list(found[1].records())
    check(caught.value, log)
    assert isinstance(caught.value, CorruptBatch)
    with pytest.raises(UnreadableBatch):
        found[1].check()
    assert values(log, caught.value.next_offset) == [b"after"]
    found[2].check()


@every_kind
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_reader_that_skips_damage_skips_it(tmp_path: Path, kind: str, start: int) -> None:
    """Starting before the batch, at its first offset or in its middle, `on_skip` gets the wanted offsets."""
    log = open_log(tmp_path)
    append_around(log, kind)
    skipped: list[Any] = []
    read = [
        record.value
        for batch in log.read(start, on_skip=lambda *one: skipped.append(one))
        for record in batch.records()
    ]
    assert read == [b"before", b"after"][min(start, 1) :]
    ((base, end, error),) = skipped
    assert (base, end) == (max(start, 1), 4)
    check(error, log)


@pytest.mark.parametrize("append", [Partition.append, append_sent], ids=["columns", "kafka"])
@pytest.mark.parametrize("start", range(5))
def test_a_reader_that_skips_damage_begins_anywhere(tmp_path: Path, append: Any, start: int) -> None:
    """Exactly at its offset, with everything of each record: the batch was decoded as a whole before."""
    log = open_log(tmp_path)
    rows = [(b"v%d" % n, b"k%d" % n, NOW_MS + n, (("h", b"%d" % n),)) for n in range(5)]
    append(log, *map(list, zip(*rows, strict=True)))
    skipped: list[Any] = []
    found = contents(log, start, on_skip=lambda *one: skipped.append(one))
    assert found == contents(log, start)
    assert [(one.offset, one.value, one.key, one.timestamp, one.headers) for one in found] == [
        (n, *row) for n, row in enumerate(rows)
    ][start:]
    (batch,) = log.read(start, on_skip=lambda *one: skipped.append(one))
    assert len(batch.values) == len(batch.keys) == len(batch.headers) == len(batch.offsets) == len(batch) == 5 - start
    assert skipped == []


def test_a_salvaged_log_skips_it(store: LogStore) -> None:
    """`damage` has it, once."""
    append_around(store.open_partition("t", 0))
    store.close()
    with segmentlog.open(store.path, recovery="salvage", background=False) as again:
        log = again.open_partition("t", 0)
        for _ in range(2):
            assert values(log) == [b"before", b"after"]
        ((base, end, error),) = log.damage
        assert (base, end) == (1, 4)
        assert isinstance(error, UnreadableBatch)


def test_a_strict_opening_takes_it(store: LogStore) -> None:
    """The log is as it was written: nothing is refused but the reading of that batch."""
    append_around(store.open_partition("t", 0))
    store.close()
    with segmentlog.open(store.path, recovery="strict", background=False) as again:
        assert values(again.open_partition("t", 0), 4) == [b"after"]


@each_layout
def test_what_was_aborted_need_not_be_readable(tmp_path: Path, kind: str) -> None:
    """A reader of committed records passes an aborted batch, with and without `on_skip`; others meet it."""
    log = open_log(tmp_path)
    log.append([b"before"])
    batch = KINDS[kind]()
    if kind != "columns":
        made = foreign([Sent(b"k", b"v")], producer=(7, 0, 0), transactional=True)
        batch = encoded(forged(made, record_count=COUNT, last_offset_delta=COUNT - 1))
    log.append_batches([batch], producer=ProducerStamp(7, 0, 0, transactional=True))
    log.end_transaction(7, 0, committed=False)
    log.append([b"after"])
    skipped: list[Any] = []
    assert values(log, isolation="read_committed") == [b"before", b"after"]
    assert values(log, isolation="read_committed", on_skip=lambda *one: skipped.append(one)) == [b"before", b"after"]
    assert skipped == []
    with pytest.raises(UnreadableBatch):
        values(log)


@each_layout
def test_time_look_ups(tmp_path: Path, kind: str) -> None:
    """A lookup that must decode the batch raises; one that its header answers does not."""
    log = open_log(tmp_path)
    append_around(log, kind)
    assert log.offset_for_timestamp(NOW_MS - 1000) == 0
    assert log.offset_for_timestamp(NOW_MS + 1000) == 4
    assert log.offset_for_timestamp(NOW_MS + 1001) is None
    if kind != "columns":  # its timestamps alone do decode
        with pytest.raises(UnreadableBatch) as caught:
            log.offset_for_timestamp(NOW_MS)
        check(caught.value, log)


# ---------------------------------------------------------------- consumers


@each_layout
def test_a_consumer_hands_out_what_comes_before_it(store: LogStore, kind: str) -> None:
    """The consumer returns them, and then raises at each call until it is moved to the offset in the error."""
    log = store.open_partition("t", 0)
    append_around(log, kind)
    with store.consumer("t") as consumer:
        read = []
        for _ in range(2):
            with pytest.raises(UnreadableBatch) as caught:
                read += [record.value for record in consumer]
            check(caught.value, log)
            assert consumer.position("t") == 1
        consumer.seek("t", 0, caught.value.next_offset)
        read += [record.value for record in consumer]
    with store.consumer("t") as consumer:
        for record in consumer:
            read.append(record.value)
            break
    assert read == [b"after", b"before"]


@each_layout
def test_poll(store: LogStore, kind: str) -> None:
    """A list of what comes before it, then the error, then what follows."""
    append_around(store.open_partition("t", 0), kind)
    with store.consumer("t") as consumer:
        assert [record.value for record in consumer.poll()] == [b"before"]
        for _ in range(2):
            with pytest.raises(UnreadableBatch) as caught:
                consumer.poll()
        consumer.seek("t", 0, caught.value.next_offset)
        assert [record.value for record in consumer.poll()] == [b"after"]


@each_layout
@pytest.mark.parametrize(
    "options",
    [{}, {"deserializer": text_codec()}, {"isolation": "read_committed"}],
    ids=["plain", "deserializer", "read_committed"],
)
def test_a_consumer_that_skips_damage(store: LogStore, kind: str, options: dict[str, Any]) -> None:
    """Records, batches and lists without it; `skipped` says which offsets, and why."""
    log = store.open_partition("t", 0)
    append_around(log, kind)
    expected = ["before", "after"] if options.get("deserializer") else [b"before", b"after"]
    with store.consumer("t", skip_damaged=True, **options) as consumer:
        assert [record.value for record in consumer] == expected
        ((tp, base, end, error),) = consumer.skipped
        assert (tp, base, end) == (TopicPartition("t", 0), 1, 4)
        check(error, log)  # type: ignore[arg-type]
        assert consumer.position("t") == 5
    with store.consumer("t", skip_damaged=True, **options) as consumer:
        assert [value for batch in consumer.batches() for value in batch.values] == expected
    with store.consumer("t", skip_damaged=True, **options) as consumer:
        assert [record.value for record in consumer.poll()] == expected


def test_a_member_of_a_group_that_skips_it_commits_behind_it(store: LogStore) -> None:
    """This also holds if it is the last batch of the log: the next member does not get it again."""
    log = store.open_partition("t", 0)
    log.append([b"before"])
    append_unreadable(log)
    with store.consumer("t", group="g", skip_damaged=True) as consumer:
        assert [record.value for record in consumer] == [b"before"]
        consumer.commit()
    with store.consumer("t", group="g") as consumer:
        assert [record.value for record in consumer] == []
        assert consumer.committed("t").offset == 4  # type: ignore[union-attr]


@each_layout
def test_an_asynchronous_consumer_hands_out_what_comes_before_it(store: LogStore, kind: str) -> None:
    """The consumer returns the records fetched before the batch, then raises the error, then returns the rest."""
    log = store.open_partition("t", 0)
    append_around(log, kind)

    async def records() -> list[bytes | None]:
        read: list[bytes | None] = []

        async def read_on(consumer: AsyncConsumer) -> None:
            async for record in consumer:
                read.append(record.value)

        async with store.aconsumer("t") as consumer:
            for _ in range(2):
                with pytest.raises(UnreadableBatch) as caught:
                    await read_on(consumer)
                check(caught.value, log)
                assert consumer.position("t") == 1
            await consumer.seek("t", 0, caught.value.next_offset)
            await read_on(consumer)
        return read

    async def lists() -> list[bytes | None]:
        read: list[bytes | None] = []
        async with store.aconsumer("t") as consumer:
            read += [record.value for record in await consumer.poll()]
            with pytest.raises(UnreadableBatch) as caught:
                await consumer.poll()
            await consumer.seek("t", 0, caught.value.next_offset)
            read += [record.value for record in await consumer.poll()]
        return read

    async def skipping() -> list[bytes | None]:
        async with store.aconsumer("t", skip_damaged=True) as consumer:
            read = [record.value async for record in consumer]
            assert [one[1:3] for one in consumer.skipped] == [(1, 4)]
        return read

    for read in (records, lists, skipping):
        assert asyncio.run(read()) == [b"before", b"after"], read.__name__


def test_a_table_raises(store: LogStore) -> None:
    """The table would lack the batch's keys; a table of the records before the batch works."""
    log = store.open_partition("t", 0)
    log.append([b"before"], keys=[b"a"])
    table = store.table("t")
    append_unreadable(log)
    for make in (lambda: store.table("t"), table.refresh):
        with pytest.raises(UnreadableBatch) as caught:
            make()
        check(caught.value, log)
    assert dict(table.as_of(1)) == {b"a": b"before"}


# ---------------------------------------------------------------- the command line


@each_layout
def test_consume(store: LogStore, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """Prints what comes before it, names it, and exits with 4; continues where it is told to, or skips it."""
    append_around(store.open_partition("t", 0), kind)
    path = Path(store.path)
    assert command(path, "consume", "t") == 4
    out, err = capfd.readouterr()
    assert out == "0 before\n"
    assert "Continue at offset 4" in err
    assert REMEDY in err
    assert command(path, "consume", "t", "--from", "4") == 0
    assert capfd.readouterr().out == "4 after\n"
    assert command(path, "consume", "t", "--skip-damaged") == 4
    out, err = capfd.readouterr()
    assert out == "0 before\n4 after\n"
    assert "skipped unreadable offsets 1 to 3" in err


@each_layout
@pytest.mark.parametrize("arguments", [("tail", "t"), ("export", "t"), ("export", "t", "--format", "csv")], ids=str)
def test_other_commands(
    store: LogStore, capfd: pytest.CaptureFixture[str], kind: str, arguments: tuple[str, ...]
) -> None:
    """Each command names the batch, and exits with 4."""
    append_around(store.open_partition("t", 0), kind)
    assert command(Path(store.path), *arguments) == 4
    assert "Continue at offset 4" in capfd.readouterr().err


SKIPPING: dict[tuple[str, ...], str] = {
    ("tail", "t"): "before\nafter\n",
    ("tail", "t", "-n", "1"): "after\n",
    ("tail", "t", "-n", "2"): "before\nafter\n",
    ("tail", "t", "--contains", "e"): "before\nafter\n",
    ("tail", "t", "--isolation", "read_committed"): "before\nafter\n",
    ("export", "t", "--format", "csv"): "before|after",
}


@each_layout
@pytest.mark.parametrize("arguments", SKIPPING, ids=" ".join)
def test_other_commands_that_skip_it(
    store: LogStore, capfd: pytest.CaptureFixture[str], kind: str, arguments: tuple[str, ...]
) -> None:
    """They print what comes before it and after it, name its offsets once, and exit with 4.

    Where `tail` prints only what comes after it, nothing is skipped.
    """
    is_after = arguments[-1] == "1"
    append_around(store.open_partition("t", 0), kind)
    path = Path(store.path)
    assert command(path, *arguments, "--skip-damaged") == (0 if is_after else 4)
    out, err = capfd.readouterr()
    for part in SKIPPING[arguments].split("|"):
        assert part in out
    assert err.count("skipped unreadable offsets 1 to 3") == (not is_after)
    assert "Continue at offset" not in err


@pytest.mark.parametrize("form", ["ndjson", "csv", "ndjson.gz"])
def test_an_export_to_a_file_that_skips_it(
    store: LogStore, tmp_path: Path, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    """The file has all other records, and is checked. Beyond the offsets that are exported nothing is skipped."""
    log = store.open_partition("t", 0)
    append_around(log)
    append_unreadable(log)
    file = tmp_path / f"out.{form}"
    assert command(Path(store.path), "export", "t", str(file)) == 4
    assert not file.exists()
    capfd.readouterr()
    assert command(Path(store.path), "export", "t", str(file), "--skip-damaged", "--to", "5") == 4
    err = capfd.readouterr().err
    assert "skipped unreadable offsets 1 to 3" in err
    assert err.count("skipped") == 1
    assert "2 records exported" in err
    assert command(Path(store.path), "export", "t", str(file), "--skip-damaged", "--to", "1") == 0


def test_a_registry_skips_it(store: LogStore, caplog: pytest.LogCaptureFixture) -> None:
    """Schemas around an unreadable batch are found, ids are given once, and the log names the offsets once."""
    schemas = store.schemas
    first = schemas.register("a-value", Draft('"string"'))
    append_unreadable(store.topic("_schemas").partition(0))
    for registry in (schemas, SchemaRegistry(store._topics)):
        for _ in range(2):
            assert registry.register("a-value", Draft('"string"')).id == first.id
    second = schemas.register("b-value", Draft('"long"'))
    assert second.id > first.id
    assert {one.id for one in (schemas.version("a-value", "latest"), schemas.version("b-value", "latest"))} == {
        first.id,
        second.id,
    }
    told = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(told) == 2  # of each registry
    assert all("offsets 1 to 3" in one.getMessage() for one in told)


def test_damage_and_an_unreadable_batch(store: LogStore) -> None:
    """Damage comes to 3, as ever: what comes first says it."""
    log = store.open_partition("t", 0)
    append_around(log)
    position = next(log.read(0))._position
    store.close()
    with Path(log.folder, "00000000000000000000.log").open("r+b") as file:
        file.seek(position + 96)
        file.write(b"!")
    assert command(Path(store.path), "consume", "t") == 3


# ---------------------------------------------------------------- over the network


@each_layout
def test_http(store: LogStore, kind: str) -> None:
    """REST names the batch without its path, and continues at a requested offset; the console shows the rest."""
    append_around(store.open_partition("t", 0), kind)
    body = {"content-type": "application/vnd.kafka.v2+json"}
    accept = {"accept": "application/vnd.kafka.binary.v2+json"}
    with Client(HttpContext(store)) as client:
        made = {"name": "i", "format": "binary", "auto.offset.reset": "earliest"}
        assert client.post("/consumers/g", json=made, headers=body).status_code == 200
        instance = "/consumers/g/instances/i"
        assert client.post(f"{instance}/subscription", json={"topics": ["t"]}, headers=body).status_code == 204
        records = f"{instance}/records?timeout=50"
        assert [one["offset"] for one in client.get(records, headers=accept).json()] == [0]
        for path in (records, records, "/topics/t/partitions/0/records?offset=1"):
            answer = client.get(path, headers=accept if path == records else {})
            assert answer.status_code == 500, path
            assert "t/0/00000000000000000000.log: the batch at byte" in answer.text
            assert "Continue at offset 4" in answer.text
            assert store.path not in answer.text
        there = {"offsets": [{"topic": "t", "partition": 0, "offset": 4}]}
        assert client.post(f"{instance}/positions", json=there, headers=body).status_code == 204
        assert [one["offset"] for one in client.get(records, headers=accept).json()] == [4]
        assert client.delete(instance).status_code == 204
        shown = client.get("/ui/topics/t/records").text
        assert "before" in shown
        assert "after" in shown
        assert "Continue at offset 4" in shown
        assert "Continue at offset 4" in client.get("/ui/topics/t/records/0/2").text


@pytest.fixture
def client(store: LogStore) -> Iterator[WireClient]:
    """Yield a client of a server of the store."""
    with Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
        owns_store=False,
    ) as server, WireClient(server.bootstrap_servers) as made:  # fmt: skip
        yield made


def fetched(client: WireClient, offset: int) -> Any:
    """Return the answer to a fetch from there on."""
    wanted = FetchTopic("t", partitions=[FetchPartition(0, fetch_offset=offset, partition_max_bytes=1 << 20)])
    request = FetchRequest(max_wait_ms=0, max_bytes=1 << 20, topics=[wanted])
    return client.ask(1, 11, request).responses[0].partitions[0]


def test_kafkas_clients(store: LogStore, client: WireClient) -> None:
    """A batch of Kafka's layout goes out as it came; what has to be looked into is answered with CORRUPT_MESSAGE."""
    kafka, columns = append_around(store.open_partition("t", 0)), append_around(store.open_partition("t", 0), "columns")
    first = fetched(client, 0)
    assert first.error_code == 0
    assert b"lost 0" in bytes(first.records)
    assert fetched(client, kafka.base).error_code == 0
    assert fetched(client, columns.base).error_code == ErrorCode.CORRUPT_MESSAGE
    assert b"after" in bytes(fetched(client, columns.end).records)
    asked = ListOffsetsTopic("t", [ListOffsetsPartition(0, -1, NOW_MS)])
    told = client.ask(2, 5, ListOffsetsRequest(-1, 0, [asked])).topics[0].partitions[0]
    assert told.error_code == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("append", [Partition.append, append_sent], ids=["columns", "kafka"])
def test_a_fetch_has_what_comes_before_damage(
    store: LogStore, client: WireClient, append: Callable[[Partition, list[bytes]], int]
) -> None:
    """For any layout, a fetch has the batches before it; a fetch at the damaged batch gets the error."""
    log = store.open_partition("t", 0)
    for value in (b"first", b"second", b"third"):
        append(log, [value])
    path = Path(log.folder, "00000000000000000000.log")
    flip(path, path.read_bytes().index(b"third"))
    first = fetched(client, 0)
    assert first.error_code == 0
    assert b"second" in bytes(first.records)
    assert fetched(client, 2).error_code == ErrorCode.KAFKA_STORAGE_ERROR


def test_a_stream_ends_with_it(store: LogStore) -> None:
    """The records before it come first; the last event has the message."""
    append_around(store.open_partition("t", 0))
    with Client(HttpContext(store)) as client:
        text = client.get("/topics/t/stream?from=earliest").text
    assert text.index("before") < text.index("Continue at offset 4")


def test_the_error_stands_for_itself() -> None:
    """This also holds without a file."""
    error = UnreadableBatch("", 0, "why", 7, 9, 2)
    assert str(error).startswith("a batch (offsets [7, 9), 2 records) cannot be read: why. ")
    assert isinstance(error, SegmentlogError)


@pytest.mark.parametrize("spoil", ["unreadable", "damaged"])
def test_a_page_of_records_ends_before_it(store: LogStore, spoil: str) -> None:
    """A page of records ends before the batch, and the request that begins at the batch gets the reason."""
    log = store.open_partition("t", 0)
    log.append([b"before"])
    log.append([b"spoilt"]) if spoil == "damaged" else append_unreadable(log)
    log.append([b"after"])
    if spoil == "damaged":
        path = Path(log.folder, "00000000000000000000.log")
        flip(path, path.read_bytes().index(b"spoilt"))
    with Client(HttpContext(store)) as client:
        page = client.get("/topics/t/partitions/0/records?offset=0").json()
        assert [one["offset"] for one in page["records"]] == [0]
        assert page["next_offset"] == 1
        assert client.get("/topics/t/partitions/0/records?offset=1").status_code == 500
    sent = b""
    with HttpServer(store, host="127.0.0.1", port=0) as server, httpx.Client() as web, contextlib.suppress(
        httpx.RemoteProtocolError  # how a client sees that the lines are not complete
    ), web.stream(
        "GET", f"http://{server.address}/topics/t/partitions/0/records", headers={"accept": "application/x-ndjson"}
    ) as lines:  # fmt: skip
        for piece in lines.iter_raw():
            sent += piece
    assert b"before" in sent
    assert b"after" not in sent
