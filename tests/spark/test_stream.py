"""`spark.readStream.format("segmentlog")`: every record once, in bounded micro-batches, whatever comes and goes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

import segmentlog
from segmentlog.errors import CorruptBatch, SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.records import TopicPartition
from segmentlog.spark.offset_ranges import DataLoss
from segmentlog.spark.query_lag import measure_lag
from segmentlog.spark.schema import source_schema
from segmentlog.spark.source_options import parse_read_options
from segmentlog.spark.stream_reader import StreamReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store that the module's tests add topics to, each its own."""
    return str(tmp_path_factory.mktemp("stream") / "store")


@pytest.fixture
def store(path: str) -> Iterator[segmentlog.LogStore]:
    """Provide the store, open in this process while Spark's read it."""
    with segmentlog.open(path, background=False) as opened:
        yield opened


class RecordWaiter:
    """Collects what a query is handed, micro-batch by micro-batch."""

    def __init__(self, spark: SparkSession, path: str, checkpoint: Path) -> None:
        self._spark, self._path, self._checkpoint = spark, path, str(checkpoint)
        self.batches: list[list[str]] = []

    def take(self, frame: Any, batch_id: int) -> None:
        self.batches.append([row.value for row in frame.select("value").collect()])

    @property
    def values(self) -> list[str]:
        """All of them, sorted."""
        return sorted(value for batch in self.batches for value in batch)

    @contextmanager
    def follow(self, *, now: bool = True, **options: object) -> Iterator[StreamingQuery]:
        """Run a query over the existing records (`now`), or until the end of the block."""
        reader = self._spark.readStream.format("segmentlog").schema("value string, offset long, topic string")
        for name, value in options.items():
            reader = reader.option(name, str(value))
        writer = (
            reader.load(self._path).writeStream.option("checkpointLocation", self._checkpoint).foreachBatch(self.take)
        )
        query = (
            writer.trigger(availableNow=True) if now else writer.trigger(processingTime="100 milliseconds")
        ).start()
        try:
            yield query
            if now:
                query.awaitTermination()
        finally:
            query.stop()

    def run(self, **options: object) -> list[list[str]]:
        """Read the existing records in a query, and return only the batches of this run."""
        before = len(self.batches)
        for is_last in (False, False, True):
            try:
                with self.follow(**options):
                    pass
                break
            except StreamingQueryException as error:
                if is_last or "failed to connect back" not in str(error):  # Spark gives a new process ten seconds
                    raise
        return self.batches[before:]

    def wait_for(self, query: StreamingQuery, values: list[str]) -> None:
        """Wait until exactly these values have come."""
        ends = time.monotonic() + 30
        while self.values != sorted(values) and time.monotonic() < ends:
            if query.exception() is not None:
                raise query.exception()  # type: ignore[misc]
            time.sleep(0.05)
        assert self.values == sorted(values)


@pytest.fixture
def follower(spark: SparkSession, path: str, tmp_path: Path) -> RecordWaiter:
    """Return a query with a checkpoint of its own."""
    return RecordWaiter(spark, path, tmp_path / "checkpoint")


def texts(*numbers: int) -> list[str]:
    """Return the values of such records."""
    return [str(number) for number in numbers]


def fill(log: Any, *numbers: int) -> None:
    """Append a batch for each record, so that limits can end between any two."""
    for number in numbers:
        log.append([b"%d" % number])


# ---------------------------------------------------------------- with Spark


def test_what_is_there_now_and_no_more(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """availableNow reads the existing records in micro-batches of the given size, ends, and later continues there."""
    log = store.create_topic("now").partition(0)
    fill(log, *range(10))
    found = follower.run(subscribe="now", startingOffsets="earliest", maxOffsetsPerTrigger=4)
    assert found == [texts(0, 1, 2, 3), texts(4, 5, 6, 7), texts(8, 9)]
    assert follower.run(subscribe="now", startingOffsets="earliest", maxOffsetsPerTrigger=4) == []
    fill(log, 10, 11)
    assert follower.run(subscribe="now", startingOffsets="earliest") == [texts(10, 11)]


def test_offsets_to_begin_at(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """JSON offsets count for the first start; later the checkpoint does."""
    log = store.create_topic("begin").partition(0)
    fill(log, *range(5))
    offsets = '{"begin": {"0": 3}}'
    assert follower.run(subscribe="begin", startingOffsets=offsets) == [texts(3, 4)]
    fill(log, 5)
    assert follower.run(subscribe="begin", startingOffsets='{"begin": {"0": 0}}') == [texts(5)]


def test_following(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """By default it starts at the latest record; later records, partitions and topics come from their first record."""
    log = store.create_topic("follow-a").partition(0)
    fill(log, 1)
    with follower.follow(now=False, subscribePattern="follow-.*") as query:
        wait_for_start(query)
        fill(log, 2)
        follower.wait_for(query, texts(2))
        fill(store.create_topic("follow-b").partition(0), 3)
        fill(store.create_topic("other").partition(0), 99)
        follower.wait_for(query, texts(2, 3))
        # An idle query makes no micro-batches.
        ends = time.monotonic() + 30
        while '"follow-b": {"0": 1, ' not in last_offset(query) and time.monotonic() < ends:
            time.sleep(0.05)  # rows come before Spark reports their micro-batch
        assert '"follow-b": {"0": 1, ' in last_offset(query)
        count, offset = len(follower.batches), last_offset(query)
        time.sleep(0.5)
        assert len(follower.batches) == count
        assert last_offset(query) == offset
    fill(log, 4)
    with follower.follow(now=False, subscribePattern="follow-.*") as query:
        follower.wait_for(query, texts(2, 3, 4))


def wait_for_start(query: StreamingQuery) -> None:
    """Wait until the query has chosen its start: it has looked for records, and found none."""
    ends = time.monotonic() + 30
    while query.lastProgress is None and time.monotonic() < ends:
        time.sleep(0.05)
    assert query.lastProgress is not None


def last_offset(query: StreamingQuery) -> Any:
    """Return the end of the last micro-batch."""
    return query.lastProgress["sources"][0]["endOffset"]


def test_a_topic_of_few_partitions_gets_more(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """Records of a partition that did not exist when the query began are read, all of them."""
    fill(store.create_topic("grow-1").partition(0), 1)
    assert follower.run(subscribePattern="grow-.*", startingOffsets="latest") in ([], [[]])
    fill(store.create_topic("grow-2", partitions=2).partition(1), 2, 3)
    assert follower.run(subscribePattern="grow-.*", startingOffsets="latest") == [texts(2, 3)]


def test_retention_overtakes(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """Records that are gone before they were read are an error; with failOnDataLoss = false the rest is read."""
    log = store.create_topic("overtaken").partition(0)
    fill(log, 0, 1)
    follower.run(subscribe="overtaken", startingOffsets="earliest")
    fill(log, 2, 3, 4, 5)
    log.trim(4)
    with pytest.raises(StreamingQueryException, match=r"overtaken/0: offset 2 is outside the log.*failOnDataLoss"):
        follower.run(subscribe="overtaken")
    assert follower.run(subscribe="overtaken", failOnDataLoss="false") == [texts(4, 5)]


def test_a_truncated_log(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """A query that had read truncated offsets gets an error with them; with failOnDataLoss = false it continues."""
    log = store.create_topic("cut").partition(0)
    fill(log, *range(6))
    follower.run(subscribe="cut", startingOffsets="earliest")
    log.truncate(3)
    fill(log, 6)
    with pytest.raises(StreamingQueryException, match=r"cut/0: offset 6 is inside the lost range \[3, 7\)"):
        follower.run(subscribe="cut")
    assert follower.run(subscribe="cut", failOnDataLoss="false") == [texts(6)]
    fill(log, 7, 8)
    assert follower.run(subscribe="cut", maxOffsetsPerTrigger=1) == [texts(7), texts(8)]


def test_a_topic_is_made_anew_under_a_query(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """A query never mistakes new records for those that it has read: it stops, or reads the new topic completely."""
    fill(store.create_topic("anew").partition(0), *range(10))
    follower.run(subscribe="anew", startingOffsets="earliest", groupId="anew")
    store.delete_topic("anew")
    fill(store.create_topic("anew").partition(0), *range(100, 130))
    with pytest.raises(StreamingQueryException, match=r"anew: it is another topic of the same name.*failOnDataLoss"):
        follower.run(subscribe="anew", groupId="anew")
    found = follower.run(subscribe="anew", failOnDataLoss="false", groupId="anew", maxOffsetsPerTrigger=20)
    assert found == [texts(*range(100, 120)), texts(*range(120, 130))]
    assert lags_of(store, "anew") == [0]


def test_a_group_shows_how_far_it_is(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """With groupId, the query commits its offsets as a group, whose lag people can see."""
    log = store.create_topic("grouped", partitions=2)
    fill(log.partition(0), *range(6))
    fill(log.partition(1), *range(4))
    with follower.follow(now=False, subscribe="grouped", startingOffsets="earliest", groupId="query") as query:
        follower.wait_for(query, texts(*range(6), *range(4)))
        fill(log.partition(0), 6)
        follower.wait_for(query, texts(*range(7), *range(4)))
        ends = time.monotonic() + 20
        while time.monotonic() < ends and (lags := lags_of(store, "query")) != [0, 0]:
            time.sleep(0.05)
    assert lags == [0, 0]  # while it is idle


def test_a_query_that_ends_has_told_its_group(store: segmentlog.LogStore, follower: RecordWaiter) -> None:
    """A query over what is there now leaves a lag of 0, and one that failed the lag of what it did not do."""
    log = store.create_topic("ended").partition(0)
    fill(log, *range(6))
    follower.run(subscribe="ended", startingOffsets="earliest", groupId="ended", maxOffsetsPerTrigger=4)
    assert lags_of(store, "ended") == [0]
    fill(log, 6, 7)
    log.append([b"\xff"])
    with pytest.raises(StreamingQueryException, match="not UTF-8"):
        follower.run(subscribe="ended", groupId="ended", maxOffsetsPerTrigger=2)
    assert lags_of(store, "ended") == [1]


def lags_of(store: segmentlog.LogStore, group: str) -> list[int]:
    """Return the lags by partition."""
    return [one.lag for one in sorted(store.groups.describe(group).partitions, key=lambda one: one.partition)]


def test_how_far_a_query_is_behind(store: segmentlog.LogStore, follower: RecordWaiter, path: str) -> None:
    """Offsets by partition and stored bytes, from the progress of each micro-batch; Kafka's names for them."""
    topic = store.create_topic("behind", partitions=2, compression_type="none")
    for _ in range(10):
        topic.partition(0).append([b"x" * 1000])
    with follower.follow(subscribe="behind", startingOffsets="earliest", maxOffsetsPerTrigger=4) as query:
        query.awaitTermination()
        found = [measure_lag(progress, path) for progress in query.recentProgress]
    assert [one.offsets for one in found[:3]] == [{("behind", 0): left, ("behind", 1): 0} for left in (6, 2, 0)]
    assert 6000 < found[0].size_bytes < 7000
    assert found[2].size_bytes == 0
    assert found[0].metrics()["maxOffsetsBehindLatest"] == "6"
    assert str(found[1]).startswith(f"segmentlog {path}: behind: 2 offsets (")
    assert measure_lag(None, path).total == 0


# ---------------------------------------------------------------- the reader alone


def test_behind_topics_that_are_gone(store: segmentlog.LogStore, path: str) -> None:
    """The progress in a former topic with more partitions says nothing about the topic that has its name now."""
    topic = store.create_topic("b-anew", partitions=2)
    store.create_topic("b-stays").partition(0).append([b"x"] * 3)

    def progress(*ids: str) -> dict[str, Any]:
        document = {"b-anew": {"0": 0, "1": 0, "id": ids[0]}, "b-stays": {"0": 1, "id": ids[1]}}
        later = {"b-anew": {"0": 5, "1": 5, "id": ids[0]}, "b-stays": {"0": 3, "id": ids[1]}}
        return {"sources": [{"endOffset": json.dumps(document), "latestOffset": json.dumps(later)}]}

    told = progress(topic.id, store.topic("b-stays").id)
    assert measure_lag(told, path).total == 12
    store.delete_topic("b-anew")
    assert measure_lag(told, path).offsets == {("b-stays", 0): 2}
    store.create_topic("b-anew")
    assert measure_lag(told, path).offsets == {("b-stays", 0): 2}


@pytest.fixture
def reader_of(path: str) -> Iterator[Callable[..., StreamReader]]:
    """Yield a function that creates the source as Spark's driver has it, without Spark."""
    made = []

    def reader_of(**options: object) -> StreamReader:
        texts = {"path": path, **{name: str(value) for name, value in options.items()}}
        made.append(StreamReader(parse_read_options(texts, streaming=True), source_schema(include_headers=False)))
        return made[-1]

    yield reader_of
    for reader in made:
        reader.stop()


ReaderOf = Callable[..., StreamReader]


def ends(reader: StreamReader, start: Any) -> Any:
    """Return the end of the next micro-batch, without topic ids, like a checkpoint from before topics had ids."""
    return numbers(latest(reader, start))


def latest(reader: StreamReader, start: Any) -> Any:
    """Return the same as Spark keeps it."""
    return json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))


def numbers(document: Any) -> Any:
    """Return the offsets of the document."""
    return {topic: {key: some[key] for key in some if key != "id"} for topic, some in document.items()}


def test_where_a_stream_begins(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """A stream begins at the latest offsets by default, at the earliest, or at offsets given as JSON."""
    fill(store.create_topic("r-begin").partition(0), 0, 1)
    assert numbers(reader_of(subscribe="r-begin").initialOffset()) == {"r-begin": {"0": 2}}
    assert numbers(reader_of(subscribe="r-begin", startingOffsets="earliest").initialOffset()) == {"r-begin": {"0": 0}}
    offsets = '{"r-begin": {"0": 1}}'
    assert numbers(reader_of(subscribe="r-begin", startingOffsets=offsets).initialOffset()) == {"r-begin": {"0": 1}}


def test_offsets_are_one_text(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Spark compares texts: a difference without new records would make it spin."""
    for name in ("r-text-b", "r-text-a"):
        for log in store.create_topic(name, partitions=12).partitions():
            fill(log, 0)
    reader = reader_of(subscribePattern="r-text-.*", startingOffsets="earliest")
    end = latest(reader, reader.initialOffset())
    told = {json.dumps(end), json.dumps(latest(reader, end)), json.dumps(latest(reader, json.loads(json.dumps(end))))}
    assert len(told) == 1
    assert reader.partitions(end, end) == []
    assert json.dumps(reader.reportLatestOffset()) in told


def test_a_limit_of_offsets(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """A trigger has at most this many offsets, from all partitions that have some."""
    topic = store.create_topic("r-limit", partitions=2)
    fill(topic.partition(0), *range(30))
    fill(topic.partition(1), *range(10))
    reader = reader_of(subscribe="r-limit", startingOffsets="earliest", maxOffsetsPerTrigger=8)
    end = ends(reader, reader.initialOffset())
    assert end == {"r-limit": {"0": 6, "1": 2}}
    for _ in range(4):
        end = ends(reader, end)
    assert end == {"r-limit": {"0": 30, "1": 10}}


def test_a_limit_of_offsets_starves_no_partition(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Every partition with records advances in each micro-batch, however large the backlog of another one is."""
    topic = store.create_topic("r-small", partitions=4)
    topic.partition(0).append([b"x"] * 6000)
    for number in (1, 2, 3):
        fill(topic.partition(number), 0, 1, 2)
    reader = reader_of(subscribe="r-small", startingOffsets="earliest", maxOffsetsPerTrigger=200)
    end = ends(reader, reader.initialOffset())
    assert end == {"r-small": {"0": 199, "1": 1, "2": 1, "3": 1}}
    for _ in range(2):
        topic.partition(0).append([b"x"] * 1000)  # it grows faster than it is read
        end = ends(reader, end)
    assert {number: end["r-small"][number] for number in "123"} == {"1": 3, "2": 3, "3": 3}
    # A limit below the number of partitions: an offset of each one that waits.
    reader = reader_of(subscribe="r-small", startingOffsets="earliest", maxOffsetsPerTrigger=2)
    assert ends(reader, reader.initialOffset()) == {"r-small": {"0": 1, "1": 1, "2": 1, "3": 1}}


def test_a_limit_never_ends_inside_a_lost_range(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """A micro-batch whose limit falls into lost offsets ends after the lost range, where reading continues."""
    log = store.create_topic("r-gap").partition(0)
    fill(log, *range(1000))
    log.truncate(10)
    fill(log, 10, 11)
    assert [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()] == [(10, 1001)]
    reader = reader_of(subscribe="r-gap", startingOffsets="earliest", maxOffsetsPerTrigger=5)
    starts = [reader.initialOffset()]
    for _ in range(3):
        starts.append(latest(reader, starts[-1]))
    assert [numbers(start)["r-gap"]["0"] for start in starts] == [0, 5, 1001, 1003]
    read = [
        batch.num_rows
        for start, end in pairwise(starts)
        for task in reader.partitions(start, end)
        for batch in reader.read(task)
    ]
    assert sum(read) == 12


def test_a_lost_range_takes_no_part_of_a_limit(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Partitions share a limit by their records, and read over lost ranges; a minimum is one of records, too."""
    topic = store.create_topic("r-shares", partitions=3)
    for number in range(3):
        fill(topic.partition(number), *range(15))
    topic.partition(0).append([b"x"] * 10_000)
    topic.partition(0).truncate(5)  # of its 15 records 5 are left, before a range of 10,011 offsets
    fill(topic.partition(0), *range(5, 15))
    end = topic.partition(0).log_end_offset
    reader = reader_of(subscribe="r-shares", startingOffsets="earliest", maxOffsetsPerTrigger=21)
    found, starts = [], reader.initialOffset()
    for _ in range(3):
        starts = latest(reader, starts)
        found.append(numbers(starts)["r-shares"])
    assert found == [{"0": end - 8, "1": 7, "2": 7}, {"0": end - 1, "1": 14, "2": 14}, {"0": end, "1": 15, "2": 15}]
    reader = reader_of(subscribe="r-shares", startingOffsets="earliest", minOffsetsPerTrigger=30)
    start = {"r-shares": {"0": 5, "1": 0, "2": 14}}
    assert ends(reader, start) != start, "the first one does not wait"
    assert ends(reader, start) == start, "26 records wait"
    assert ends(reader, {"r-shares": {"0": 0, "1": 0, "2": 14}}) == {"r-shares": {"0": end, "1": 15, "2": 15}}


def test_a_limit_of_bytes(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """A trigger reads about this many stored bytes, and at least a batch of each partition that has records."""
    topic = store.create_topic("r-bytes", partitions=2, compression_type="none")
    for _ in range(10):
        topic.partition(0).append([bytes(1000)])
    topic.partition(1).append([bytes(100_000)])
    reader = reader_of(subscribe="r-bytes", startingOffsets="earliest", maxBytesPerTrigger="8KiB")
    end = ends(reader, reader.initialOffset())
    assert 2 <= end["r-bytes"]["0"] <= 5
    assert end["r-bytes"]["1"] == 1
    for _ in range(4):
        end = ends(reader, end)
    assert end["r-bytes"]["0"] == 10


def test_a_limit_of_bytes_and_damage(
    store: segmentlog.LogStore, reader_of: ReaderOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage at the query's position stops it; with skipDamaged, the next micro-batch ends after the damage."""
    log = store.create_topic("r-harmed", compression_type="none").partition(0)
    for n in range(3):
        log.append([b"%d" % n * 100, b"x"])
    (file,) = Path(store.path, "r-harmed", "0").glob("*.log")
    content = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(content.index(b"0" * 50))
        opened.write(b"x")
    options = {"subscribe": "r-harmed", "startingOffsets": "earliest", "maxBytesPerTrigger": 1}
    with pytest.raises(CorruptBatch):
        ends(reader_of(**options), {"r-harmed": {"0": 0}})
    reader = reader_of(**options, skipDamaged="true")
    start = reader.initialOffset()
    end = latest(reader, start)
    assert numbers(end) == {"r-harmed": {"0": 4}}
    (task,) = reader.partitions(start, end)
    assert sum(batch.num_rows for batch in reader.read(task)) == 2
    assert "r-harmed/0: skipped offsets 0 to 1" in caplog.text


def test_a_limit_of_bytes_and_retention(
    store: segmentlog.LogStore, reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Records that are deleted while the driver computes the limit are lost data: an error, or skipped."""
    log = store.create_topic("r-going", compression_type="none").partition(0)
    fill(log, *range(10))
    options = {"subscribe": "r-going", "startingOffsets": "earliest", "maxBytesPerTrigger": 1}
    strict, lenient = reader_of(**options), reader_of(**options, failOnDataLoss="false")
    starts = [reader.initialOffset() for reader in (strict, lenient)]

    def looked_at_in_time(partition: Partition, offset: int, *, fail_on_data_loss: bool) -> int:
        log.trim(4)
        return offset

    with monkeypatch.context() as patched:
        patched.setattr("segmentlog.spark.stream_reader.find_readable_start", looked_at_in_time)
        with pytest.raises(DataLoss, match=r"r-going/0: offset 0 is outside the log.*failOnDataLoss"):
            ends(strict, starts[0])
        end = latest(lenient, starts[1])
    assert "r-going/0: offset 0 is outside the log" in caplog.text
    (task,) = lenient.partitions(starts[1], end)
    assert sum(rows.num_rows for rows in lenient.read(task)) == 6


def test_a_least_number_of_offsets(
    store: segmentlog.LogStore, reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch waits for this many offsets, but for at most maxTriggerDelay."""
    log = store.create_topic("r-least").partition(0)
    fill(log, 0, 1)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reader = reader_of(subscribe="r-least", startingOffsets="earliest", minOffsetsPerTrigger=5, maxTriggerDelay="10s")
    start = ends(reader, reader.initialOffset())
    assert start == {"r-least": {"0": 2}}  # the first one does not wait
    fill(log, 2, 3)
    assert ends(reader, start) == start
    fill(log, 4, 5, 6)
    start = ends(reader, start)
    assert start == {"r-least": {"0": 7}}
    fill(log, 7)
    now += 9.9
    assert ends(reader, start) == start
    now += 0.2
    assert ends(reader, start) == {"r-least": {"0": 8}}


def test_limits_together(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Offsets and bytes: whichever is less. A least number that is above the most still makes progress."""
    log = store.create_topic("r-both", compression_type="none").partition(0)
    for _ in range(20):
        log.append([bytes(1000)])
    options = {"subscribe": "r-both", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 3}
    reader = reader_of(**options, maxBytesPerTrigger="1MiB")
    assert ends(reader, reader.initialOffset()) == {"r-both": {"0": 3}}
    reader = reader_of(**options, maxBytesPerTrigger=1)
    assert ends(reader, reader.initialOffset()) == {"r-both": {"0": 1}}
    reader = reader_of(**options, minOffsetsPerTrigger=10)
    assert ends(reader, ends(reader, reader.initialOffset())) == {"r-both": {"0": 6}}


def test_available_now_is_what_was_available(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Records after the start of the query are not part of it; limits and earlier progress count."""
    log = store.create_topic("r-now").partition(0)
    fill(log, *range(5))
    reader = reader_of(subscribe="r-now", startingOffsets="earliest", maxOffsetsPerTrigger=3)
    reader.prepareForTriggerAvailableNow()
    fill(log, *range(5))
    end = ends(reader, reader.initialOffset())
    assert end == {"r-now": {"0": 3}}
    end = ends(reader, end)
    assert end == {"r-now": {"0": 5}}
    assert ends(reader, end) == end


@pytest.mark.parametrize("now", [False, True])
def test_a_topic_is_deleted(store: segmentlog.LogStore, reader_of: ReaderOf, now: bool) -> None:
    """An error, named or matched by a pattern; with failOnDataLoss = false its position is kept, the rest is read."""
    for name in ("r-deleted-a", "r-deleted-b"):
        fill(store.create_topic(f"{name}-{now}").partition(0), 0)
    start = {f"r-deleted-a-{now}": {"0": 1}, f"r-deleted-b-{now}": {"0": 0}}
    store.delete_topic(f"r-deleted-a-{now}")
    for options in (
        {"subscribePattern": f"r-deleted-.*-{now}"},
        {"subscribe": f"r-deleted-a-{now},r-deleted-b-{now}"},
    ):
        reader = reader_of(**options)
        with pytest.raises(DataLoss, match=f"r-deleted-a-{now}"):  # noqa: PT012
            if now:
                reader.prepareForTriggerAvailableNow()
            ends(reader, start)
        lenient = reader_of(**options, failOnDataLoss="false")
        if now:
            lenient.prepareForTriggerAvailableNow()
        assert ends(lenient, start) == {f"r-deleted-a-{now}": {"0": 1}, f"r-deleted-b-{now}": {"0": 1}}
        (task,) = lenient.partitions(start, ends(lenient, start))
        assert [one.topic for one in task.ranges] == [f"r-deleted-b-{now}"]


@pytest.mark.parametrize("count", [2, 5, 9])
def test_a_topic_is_made_anew(
    store: segmentlog.LogStore, reader_of: ReaderOf, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """A topic of the same name and any length is another topic, which raises an error.

    With failOnDataLoss = false it is a warning, and the query reads the new topic from its first record.
    """
    name = f"r-anew-{count}"
    fill(store.create_topic(name).partition(0), *range(5))
    lenient = reader_of(subscribe=name, startingOffsets="earliest", failOnDataLoss="false", maxOffsetsPerTrigger=4)
    start = latest(lenient, latest(lenient, lenient.initialOffset()))
    assert numbers(start) == {name: {"0": 5}}
    store.delete_topic(name)
    assert latest(lenient, start) == start
    fill(store.create_topic(name).partition(0), *range(count))
    with pytest.raises(DataLoss, match=f"{name}: it is another topic of the same name.*failOnDataLoss"):
        ends(reader_of(subscribe=name), start)
    caplog.clear()
    taken = 0
    while (end := latest(lenient, start)) != start:
        taken += sum(one.end - one.start for task in lenient.partitions(start, end) for one in task.ranges)
        start = end
    assert taken == count
    assert caplog.text.count("it is another topic of the same name") == 1
    fill(store.topic(name).partition(0), count)
    (task,) = lenient.partitions(start, latest(lenient, start))
    assert [(one.start, one.end) for one in task.ranges] == [(count, count + 1)]


def test_a_checkpoint_from_before_topics_had_ids(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """It continues at its position; a log that ends before that is another topic, which is read from the start."""
    fill(store.create_topic("r-old").partition(0), 0, 1)
    reader = reader_of(subscribe="r-old")
    end = latest(reader, {"r-old": {"0": 1}})
    assert end == {"r-old": {"0": 2, "id": store.topic("r-old").id}}
    (task,) = reader.partitions({"r-old": {"0": 1}}, end)
    assert [(one.start, one.end) for one in task.ranges] == [(1, 2)]
    start = {"r-old": {"0": 5}}
    with pytest.raises(
        DataLoss, match="r-old/0: the query is at offset 5, and the log ends at 2: perhaps it was created"
    ):
        ends(reader, start)
    lenient = reader_of(subscribe="r-old", failOnDataLoss="false")
    (task,) = lenient.partitions(start, latest(lenient, start))
    assert [(one.start, one.end) for one in task.ranges] == [(0, 2)]


def test_an_older_copy_of_the_topic(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """The log of the same topic ends before the query's position: an error, or it continues with new records."""
    log = store.create_topic("r-copy").partition(0)
    fill(log, 0, 1)
    start = {"r-copy": {"0": 5, "id": store.topic("r-copy").id}}
    with pytest.raises(DataLoss, match="the query is at offset 5, and the log ends at 2: perhaps it is an older copy"):
        ends(reader_of(subscribe="r-copy"), start)
    lenient = reader_of(subscribe="r-copy", failOnDataLoss="false")
    end = latest(lenient, start)
    assert (numbers(end), lenient.partitions(start, end)) == ({"r-copy": {"0": 2}}, [])
    fill(log, 2)
    (task,) = lenient.partitions(end, latest(lenient, end))
    assert [(one.start, one.end) for one in task.ranges] == [(2, 3)]


@pytest.mark.parametrize("when", ["before it is planned", "before it is read"])
def test_a_topic_is_made_anew_under_a_micro_batch(
    store: segmentlog.LogStore, reader_of: ReaderOf, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Rows of the new topic are never taken for those that were planned: an error, or they come with the next one."""
    name = f"r-under-{when[-4:]}"
    fill(store.create_topic(name).partition(0), *range(5))
    options = {"subscribe": name, "startingOffsets": "earliest"}
    strict, lenient = reader_of(**options), reader_of(**options, failOnDataLoss="false")
    start = lenient.initialOffset()
    end = latest(lenient, start)
    if when == "before it is read":
        tasks = [(reader, reader.partitions(start, end)) for reader in (strict, lenient)]
    store.delete_topic(name)
    fill(store.create_topic(name).partition(0), *range(9))
    if when == "before it is planned":
        tasks = [(lenient, lenient.partitions(start, end))]
        with pytest.raises(DataLoss, match="another topic has the name now"):
            strict.partitions(start, end)
    else:
        with pytest.raises(DataLoss, match="another topic has the name now"):
            [list(strict.read(task)) for task in tasks[0][1]]
    assert [list(lenient.read(task)) for task in tasks[-1][1]] in ([], [[]])
    assert "another topic has the name now" in caplog.text
    (task,) = lenient.partitions(end, latest(lenient, end))
    assert sum(batch.num_rows for batch in lenient.read(task)) == 9


@pytest.mark.parametrize("what", ["just created", "after a restart of the machine"])
def test_a_partition_that_nobody_writes_to_yet(store: segmentlog.LogStore, reader_of: ReaderOf, what: str) -> None:
    """A read-only query that opens the partition first still sees records that are written later."""
    name = f"r-young-{what[0]}"
    topic = store.create_topic(name)
    start = {name: {"0": 0}}
    if what != "just created":
        fill(topic.partition(0), 0, 1)
        start = {name: {"0": 2}}
        topic.partition(0).close()
        (Path(store.path) / name / "0" / "state").unlink()
    reader = reader_of(subscribe=name)
    assert ends(reader, start) == start
    with segmentlog.open(store.path, background=False) as other:
        fill(other.topic(name).partition(0), 7)
        limit = time.monotonic() + 10
        while ends(reader, start) == start and time.monotonic() < limit:
            time.sleep(0.1)
        assert ends(reader, start)[name]["0"] == start[name]["0"] + 1


def test_an_offset_that_is_not_decided_yet(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Offsets of an open transaction may be begun at: the query waits there, and nothing is lost."""
    store.create_topic("r-open")
    producer = store.producer(name="r-open")
    producer.begin_transaction()
    producer.send_many("r-open", [b"0", b"1", b"2"])
    producer.flush()
    start = {"r-open": {"0": 2}}
    reader = reader_of(subscribe="r-open")
    assert ends(reader, start) == start
    producer.commit_transaction()
    producer.close()
    assert ends(reader, start)["r-open"]["0"] > 2


def test_a_position_that_was_cut_off(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """Inside a lost range, the query gets an error that names it, or continues after it."""
    log = store.create_topic("r-cut").partition(0)
    fill(log, *range(10))
    log.truncate(6)
    fill(log, 10)
    start = {"r-cut": {"0": 8}}
    reader = reader_of(subscribe="r-cut")
    with pytest.raises(DataLoss, match=r"r-cut/0: offset 8 is inside the lost range \[6, 11\)"):
        reader.partitions(start, ends(reader, start))
    lenient = reader_of(subscribe="r-cut", failOnDataLoss="false")
    (task,) = lenient.partitions(start, ends(lenient, start))
    assert [(one.start, one.end) for one in task.ranges] == [(11, 12)]


def test_the_group_is_told(store: segmentlog.LogStore, reader_of: ReaderOf) -> None:
    """`commit` moves the group's offsets; if that fails, the query continues."""
    fill(store.create_topic("r-group").partition(0), *range(5))
    reader = reader_of(subscribe="r-group", groupId="r")
    reader.commit({"r-group": {"0": 3}})
    (described,) = store.groups.describe("r").partitions
    assert (described.lag, TopicPartition(described.topic, described.partition)) == (2, ("r-group", 0))
    reader.commit({"no-such-topic": {"0": 3}})
    reader_of(subscribe="r-group").commit({"r-group": {"0": 5}})
    with store.consumer("r-group", group="r") as member:
        list(member.batches())
        reader.commit({"r-group": {"0": 4}})  # others are at work under that name: theirs counts


def test_a_store_that_is_not_there(reader_of: ReaderOf, tmp_path: Path) -> None:
    """The error says that the host has no such folder."""
    options = parse_read_options({"path": str(tmp_path / "none"), "subscribe": "t"}, streaming=True)
    with pytest.raises(SegmentlogError, match="there is no such folder on host"):
        StreamReader(options, source_schema(include_headers=False)).initialOffset()
