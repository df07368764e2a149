"""The data source's pure half: options, ranges, how they are split, and the way to Arrow and back."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from batches import Columns, batch_bytes, read_batch
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from wire import Sent, append_unchecked, foreign

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig, InvalidRecord, InvalidTopicName, SegmentlogError, UnknownTopic
from segmentlog.format.file_names import new_topic_id
from segmentlog.format.record_batch import RecordBatch
from segmentlog.quantities import EARLIEST_MS, LATEST_MS
from segmentlog.records import TopicPartition
from segmentlog.spark.arrow_batches import ArrowRows
from segmentlog.spark.arrow_records import convert_rows
from segmentlog.spark.batch_reader import BatchReader
from segmentlog.spark.offset_ranges import (
    DataLoss,
    OffsetRange,
    Positions,
    decode_positions,
    encode_positions,
    resolve_ending_offsets,
    resolve_starting_offsets,
    select_partitions,
    split_into_tasks,
)
from segmentlog.spark.schema import (
    HEADERS,
    WrongSchema,
    arrow_schema,
    check_read_schema,
    check_write_schema,
    source_schema,
)
from segmentlog.spark.source_options import ReadOptions, parse_read_options, parse_write_options

BASIC = {"path": "/data", "subscribe": "t"}


def read(*, streaming: bool = False, **options: str) -> ReadOptions:
    """Return the options of a read of topic "t", and these."""
    return parse_read_options({**BASIC, **options}, streaming=streaming)


TYPES = {
    "binary": BinaryType(), "string": StringType(), "int": IntegerType(), "long": LongType(), "short": ShortType(),
    "timestamp": TimestampType(), "timestamp_ntz": TimestampNTZType(), "date": DateType(),
    "array<struct<key:string,value:binary>>": HEADERS, "map<string,binary>": MapType(StringType(), BinaryType()),
}  # fmt: skip


def columns_of(text: str) -> StructType:
    """Return the schema, without asking a Java that knows all of SQL: "key binary, offset long not null"."""
    found = StructType()
    for column in text.split(", "):
        name, kind, *not_null = column.split(" ")
        found.add(name, TYPES[kind], nullable=not not_null)
    return found


# ---------------------------------------------------------------- options


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    """Batch reads go from the earliest to the latest record, streams begin at the latest; lost data is an error."""
    options = read()
    assert (options.starting.at, options.ending.at) == ("earliest", "latest")
    assert read(streaming=True).starting.at == "latest"
    assert options.fail_on_data_loss
    assert not options.include_headers
    assert not options.durable_only
    assert options.isolation == "read_committed"
    assert options.no_match == "error"
    assert options.topics == ("t",)
    assert options.max_trigger_delay_ms == 15 * 60_000
    assert options.min_partitions is options.max_records_per_partition is options.max_offsets_per_trigger is None


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("failOnDataLoss", "false", "fail_on_data_loss", False),
        ("FAILONDATALOSS", "False", "fail_on_data_loss", False),
        ("includeHeaders", "true", "include_headers", True),
        ("isolation", "READ_UNCOMMITTED", "isolation", "read_uncommitted"),
        ("durableOnly", "true", "durable_only", True),
        ("minPartitions", "7", "min_partitions", 7),
        ("maxRecordsPerPartition", "1000", "max_records_per_partition", 1000),
        ("startingOffsetsByTimestampStrategy", "latest", "no_match", "latest"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_option_of_either_side(name: str, text: str, field: str, value: Any, streaming: bool) -> None:
    """Any capitalisation of its name is parsed."""
    assert getattr(parse_read_options({**BASIC, name: text}, streaming=streaming), field) == value


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("maxOffsetsPerTrigger", "500", "max_offsets_per_trigger", 500),
        ("minOffsetsPerTrigger", "50", "min_offsets_per_trigger", 50),
        ("maxBytesPerTrigger", "64MiB", "max_bytes_per_trigger", 64 << 20),
        ("maxTriggerDelay", "90s", "max_trigger_delay_ms", 90_000),
        ("maxTriggerDelay", "0", "max_trigger_delay_ms", 0),
        ("groupId", "billing", "group", "billing"),
    ],
)
def test_an_option_of_streams(name: str, text: str, field: str, value: Any) -> None:
    """A stream accepts it; for a batch read, the error says that it belongs to streams."""
    assert getattr(read(streaming=True, **{name: text}), field) == value
    with pytest.raises(InvalidConfig, match=rf"{name} = .*an option of spark.readStream; leave it out of a batch read"):
        read(**{name: text})


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_an_option_of_batch_reads(name: str) -> None:
    """A stream has no end, and says where the option belongs."""
    with pytest.raises(InvalidConfig, match=rf"{name} = .*an option of spark.read; leave it out of a streaming read"):
        read(streaming=True, **{name: "latest"})


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("subscribepatern", "subscribePattern"),
        ("max_offsets_per_trigger", "maxOffsetsPerTrigger"),
        ("failOnDataLos", "failOnDataLoss"),
    ],
)
def test_a_misspelt_option(misspelt: str, meant: str) -> None:
    """The error suggests the name that was meant."""
    with pytest.raises(InvalidConfig, match=rf"{misspelt} = 'x' is not valid: .*; did you mean {meant}\?"):
        read(**{misspelt: "x"})


def test_an_option_unlike_any() -> None:
    """The error lists all valid names, for the source and for the sink."""
    with pytest.raises(InvalidConfig, match=r"there is no such option; there are path, subscribe, "):
        read(zzz="1")
    with pytest.raises(InvalidConfig, match="there are path, topic, allowNullValues"):
        parse_write_options({"path": "/data", "zzz": "1"})
    with pytest.raises(InvalidConfig, match="did you mean topic"):
        parse_write_options({"path": "/data", "topics": "t"})


@pytest.mark.parametrize(
    "name", ["minPartitions", "maxRecordsPerPartition", "maxOffsetsPerTrigger", "minOffsetsPerTrigger"]
)
@pytest.mark.parametrize("text", ["0", "-1", "-7", "many", "1.5", "", "unlimited"])
def test_a_count_that_is_none(name: str, text: str) -> None:
    """Only whole numbers from 1 on are counts."""
    with pytest.raises(InvalidConfig, match=rf"{name} = '{text}' is not valid: a whole number from 1 on"):
        read(streaming="Trigger" in name, **{name: text})


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("maxBytesPerTrigger", "lots", "a size, such as 64MiB"),
        ("maxBytesPerTrigger", "0", "a size, such as 64MiB"),
        ("maxBytesPerTrigger", "-1", "a size, such as 64MiB"),
        ("maxTriggerDelay", "soon", "a time, such as 15m"),
        ("maxTriggerDelay", "-1", "a time, such as 15m"),
        ("failOnDataLoss", "maybe", "one of true, false"),
        ("isolation", "serializable", "one of read_uncommitted, read_committed"),
        ("startingOffsetsByTimestampStrategy", "earliest", "one of error, latest"),
        ("startingTimestamp", "yesterday", "milliseconds since 1970"),
        ("startingTimestamp", "-1", "milliseconds since 1970"),
        ("subscribePattern", "(", "a regular expression"),
    ],
)
def test_a_value_that_an_option_does_not_take(name: str, text: str, accepted: str) -> None:
    """The error names the option, the value, and what is accepted."""
    options = {name: text} if name == "subscribePattern" else {"subscribe": "t", name: text}
    with pytest.raises(InvalidConfig, match=re.escape(accepted)) as told:
        parse_read_options({"path": "/data", **options}, streaming=True)
    assert (told.value.key, told.value.value) == (name, text)


@pytest.mark.parametrize(
    "text",
    ["23", "[1]", "{", '{"t": 3}', '{"t": {"0": "1"}}', '{"t": {"zero": 1}}', '{"t": {"0": 1.5}}', '{"t": {"-1": 1}}',
     '{"t": {"0": true}}', '{"t": null}', "soonest"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets", "startingOffsetsByTimestamp"])
def test_json_that_does_not_parse(name: str, text: str) -> None:
    """Anything but an object of objects of whole numbers is refused, with an example."""
    with pytest.raises(InvalidConfig, match=r'JSON that gives .*: \{"clicks": \{"0": 23, "1": 45\}\}') as told:
        read(**{name: text})
    assert told.value.key == name


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_negative_offsets(name: str) -> None:
    """-1 is the latest and -2, where reading begins, the earliest; less than that is nothing."""
    assert read(**{name: '{"t": {"0": -1}}'})
    worst = -3 if name == "startingOffsets" else -2
    if worst == -3:
        assert read(**{name: '{"t": {"0": -2}}'})
    with pytest.raises(InvalidConfig, match="t/0: an offset from 0 on, or -1 for the latest"):
        read(**{name: f'{{"t": {{"0": {worst}}}}}'})


def test_negative_timestamps() -> None:
    """-1 does not mean "latest" there: it is refused, and not read as the beginning."""
    with pytest.raises(InvalidConfig, match="milliseconds since 1970"):
        read(startingOffsetsByTimestamp='{"t": {"0": -1}}')


def test_nothing_ends_at_the_earliest() -> None:
    """endingOffsets = earliest would read nothing, so it is refused."""
    with pytest.raises(InvalidConfig, match="a read cannot end at the earliest offset"):
        read(endingOffsets="earliest")


@pytest.mark.parametrize("side", ["starting", "ending"])
def test_which_bound_counts(side: str) -> None:
    """One timestamp for all wins over timestamps by partition, and these win over offsets."""
    one, many, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    given = {one: "5", many: '{"t": {"0": 6}}', offsets: '{"t": {"0": 7}}'}
    bounds = []
    for name in (one, many, offsets):
        bounds.append(getattr(read(**given), side))
        del given[name]
    assert [bound.at for bound in bounds] == ["timestamp", "timestamps", "offsets"]
    assert [bound.option for bound in bounds] == [one, many, offsets]
    assert bounds[0].timestamp_ms == 5
    assert [bound.per_partition for bound in bounds[1:]] == [{"t": {0: 6}}, {"t": {0: 7}}]


def test_exactly_one_thing_is_read() -> None:
    """None or two of subscribe, subscribePattern and assign are an error."""
    with pytest.raises(InvalidConfig, match="exactly one of subscribe, subscribePattern and assign"):
        parse_read_options({"path": "/data"}, streaming=False)
    with pytest.raises(InvalidConfig, match="'subscribe and assign'"):
        read(assign='{"t": [0]}')


def test_lists_of_topics() -> None:
    """Names are split at commas; twice is once; what can be no name is refused."""
    assert read(subscribe=" a, b,a").topics == ("a", "b")
    with pytest.raises(InvalidTopicName):
        read(subscribe="a,,b")
    with pytest.raises(InvalidTopicName):
        read(subscribe="a b")


@pytest.mark.parametrize("text", ["t", "{}", '{"t": 0}', '{"t": ["0"]}', '{"t": [-1]}', "[]", '{"t": []}'])
def test_assignments_that_are_none(text: str) -> None:
    """Only lists of partition numbers by topic are assignments."""
    with pytest.raises(InvalidConfig, match=r'JSON that lists partitions by topic: \{"clicks": \[0, 1\]\}'):
        parse_read_options({"path": "/data", "assign": text}, streaming=False)


def test_an_assignment_is_sorted() -> None:
    """The result is the same for any order and with repetitions."""
    options = parse_read_options({"path": "/data", "assign": '{"b": [1, 0, 1], "a": [3]}'}, streaming=False)
    assert options.partitions == (("a", 3), ("b", 0), ("b", 1))


@pytest.mark.parametrize(
    ("given_path", "path"),
    [
        ("/data/x", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("file:///data/x", "/data/x"),
        ("/data/../y/", "/y"),
    ],
)
def test_paths(given_path: str, path: str) -> None:
    """Spark's spelling of local paths is understood."""
    assert read(path=given_path).path == path
    assert parse_write_options({"path": given_path}).path == path


def test_relative_paths() -> None:
    """They are made absolute when the option is read: a worker may have another current folder."""
    assert read(path="data").path == str(Path.cwd() / "data")


@pytest.mark.parametrize("path", ["hdfs://host/x", "ftp://host/x", ""])
def test_paths_that_are_no_folders(path: str) -> None:
    """A store is in a folder that all machines have mounted, or was shipped to an object store."""
    with pytest.raises(InvalidConfig, match="path = "):
        read(path=path)


@pytest.mark.parametrize("url", ["s3://bucket/x", "s3a://bucket/x", "gs://bucket", "https://host/x", "az://x/y"])
def test_object_stores_are_read_only(url: str) -> None:
    """A source takes their URLs as they are, a sink says what to do."""
    assert read(path=url).path == url
    with pytest.raises(InvalidConfig, match="can only be read"):
        parse_write_options({"path": url})


def test_no_secret_is_told() -> None:
    """The error does not repeat a secret in a URL."""
    for url in ("s3://me:planted@bucket/x", "az://container/x?sig=planted", "hdfs://me:planted@host/x"):
        with pytest.raises(InvalidConfig, match="path = ") as told:
            parse_write_options({"path": url}) if not url.startswith("hdfs") else read(path=url)
        assert "planted" not in str(told.value)


def test_other_schemes_of_paths() -> None:
    """For URLs of Spark's own file systems, the error lists the valid schemes."""
    for path in ("hdfs://host/x", "dbfs:///x"):
        with pytest.raises(InvalidConfig, match="s3://bucket/path"):
            read(path=path)


def test_write_options() -> None:
    """A sink accepts its options, and ignores Spark's own options of a query."""
    options = parse_write_options(
        {"path": "/data", "topic": "t", "allownullvalues": "true", "transactionTimeout": "1h",
         "checkpointLocation": "x", "queryName": "q", "txnappid": "app", "txnversion": "3"}
    )  # fmt: skip
    assert (options.topic, options.allow_null_values, options.transaction_timeout_ms) == ("t", True, 3_600_000)
    assert (options.app_id, options.app_version) == ("app", 3)
    assert parse_write_options({"path": "/data"}).transaction_timeout_ms == 15 * 60_000
    assert parse_write_options({"path": "/data", "transactionTimeout": "7d"}).transaction_timeout_ms == 86_400_000


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"txnAppId": "a"}, "txnVersion = None is not valid: set it together with txnAppId"),
        ({"txnVersion": "1"}, "txnAppId = None is not valid: set it together with txnVersion"),
        ({"txnAppId": "a", "txnVersion": "one"}, "txnVersion = 'one' is not valid: a whole number from 0 on"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion = '-1' is not valid: a whole number from 0 on"),
        ({"transactionTimeout": "-1"}, "transactionTimeout = '-1' is not valid: a time"),
        ({"transactionTimeout": "0"}, "transactionTimeout = '0' is not valid: a time"),
        ({"startingOffset": "earliest"}, "there is no such option"),
        (
            {"kafka.acks": "all"},
            "segmentlog has no broker; set the option compatible = true to ignore options of the Kafka client",
        ),
        ({"compatible": "yes"}, "compatible = 'yes' is not valid: one of true, false"),
    ],
)
def test_a_sink_refuses(given: dict[str, str], match: str) -> None:
    """Options that make no sense for a sink are refused before anything is written."""
    with pytest.raises(InvalidConfig, match=re.escape(match)):
        parse_write_options({"path": "/data", **given})


def test_a_view_has_the_options_of_both() -> None:
    """Source and sink pass over each other's; what a view shows is what it is written to, if that is one topic."""
    view = {"path": "/data", "subscribe": "t", "startingOffsets": "earliest", "allowNullValues": "true"}
    assert parse_read_options(view, streaming=False).topics == ("t",)
    assert (parse_write_options(view).topic, parse_write_options(view).allow_null_values) == ("t", True)
    assert parse_write_options({**view, "topic": "u"}).topic == "u"
    assert parse_write_options({**view, "subscribe": "t,u"}).topic is None
    assert parse_write_options({"path": "/data", "subscribePattern": "t"}).topic is None


def test_what_only_kafka_knows(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With compatible = true, source and sink ignore it and log it once; a wrong value is still an error."""
    monkeypatch.setattr("segmentlog.spark.source_options._warned", set())
    kafkas = {"kafka.bootstrap.servers": "b:9092", "kafkaConsumer.pollTimeoutMs": "5", "startingOfsets": "latest"}
    given = {**BASIC, **kafkas, "compatible": "true"}
    for _ in range(2):
        assert parse_read_options(given, streaming=True).topics == ("t",)
        assert (
            parse_read_options({**given, "maxOffsetsPerTrigger": "5"}, streaming=False).max_offsets_per_trigger is None
        )
        assert parse_write_options(given).topic == "t"
    for name in (*kafkas, "maxOffsetsPerTrigger"):
        assert caplog.text.count(f"option {name} has no effect") == (2 if name == "startingOfsets" else 1)
    assert "option startingOfsets has no effect; did you mean startingOffsets?" in caplog.text
    with pytest.raises(InvalidConfig, match="failOnDataLoss"):
        parse_read_options({**given, "failOnDataLoss": "perhaps"}, streaming=True)


def test_a_sink_keeps_to_topics_of_its_own() -> None:
    """The store's internal topics are not written."""
    with pytest.raises(InvalidTopicName):
        parse_write_options({"path": "/data", "topic": "__consumer_offsets"})


# ---------------------------------------------------------------- schemas


def test_the_schema_is_that_of_sparks_kafka_source() -> None:
    """Names, types and order; headers only if they are asked for."""
    text = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
    assert source_schema(include_headers=False) == columns_of(text)
    with_headers = source_schema(include_headers=True)
    assert with_headers == columns_of(f"{text}, headers array<struct<key:string,value:binary>>")


@pytest.mark.parametrize(
    ("ddl", "told"),
    [
        ("valeu binary", "the schema has a column 'valeu', and the source has only key, value, topic"),
        ("value int", "column 'value' of the schema has type int; it must be binary or string"),
        ("offset int", "column 'offset' of the schema has type int; it must be bigint"),
        ("headers string", "column 'headers' of the schema has type string"),
        ("timestamp int", "column 'timestamp' of the schema has type int; it must be timestamp or bigint"),
    ],
)
def test_a_schema_that_the_source_does_not_have(ddl: str, told: str) -> None:
    """The error names the column, its type, and the accepted ones."""
    with pytest.raises(WrongSchema, match=re.escape(told)):
        check_read_schema(columns_of(ddl))


@pytest.mark.parametrize(
    ("ddl", "told"),
    [
        ("value int", "column 'value' of the data has type int; it must be binary or string"),
        ("value string, id long", "a record cannot hold the column 'id'"),
        ("key string", "the data has no column 'value' (only key)"),
        ("value string", "the write names no topic: set .option('topic', ...), or add a column 'topic'"),
        ("value string, topic int", "column 'topic' of the data has type int; it must be string"),
        ("value string, topic string, partition string", "column 'partition' of the data has type string"),
        ("value string, topic string, timestamp date", "column 'timestamp' of the data has type date"),
        ("value string, topic string, headers map<string,binary>", "column 'headers' of the data has type map<string"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_written(ddl: str, told: str) -> None:
    """The error names the column, its type and the accepted types, or says what to do."""
    with pytest.raises(WrongSchema, match=re.escape(told)):
        check_write_schema(columns_of(ddl), topic_is_given=False)


def test_what_was_read_can_be_written() -> None:
    """The source's own schema is one that the sink takes, and so are its other spellings."""
    check_write_schema(source_schema(include_headers=True), topic_is_given=False)
    check_write_schema(
        columns_of("value string not null, key string, partition short, timestamp timestamp_ntz"),
        topic_is_given=True,
    )


# ---------------------------------------------------------------- which offsets


@pytest.fixture
def store(tmp_path: Path) -> Iterator[segmentlog.LogStore]:
    """Provide a store without threads."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        yield opened


def resolved(
    store: segmentlog.LogStore, side: Any = resolve_starting_offsets, **options: str
) -> dict[tuple[str, int], int]:
    """Return the offsets that the options of a batch read of that store lead to."""
    given = {"path": store.path, "subscribe": "t", **options}
    if len({"assign", "subscribePattern"} & given.keys()):
        del given["subscribe"]
    found = parse_read_options(given, streaming=False)
    return dict(side(store, select_partitions(store, found), found))


def filled(store: segmentlog.LogStore) -> None:
    """Topic "t" of two partitions: ten records from 1,000 ms on, 100 ms apart, in 0; five from 5,000 ms on in 1."""
    topic = store.create_topic("t", partitions=2)
    topic.partition(0).append([b"%d" % n for n in range(10)], timestamps=[1000 + 100 * n for n in range(10)])
    topic.partition(1).append([b"%d" % n for n in range(5)], timestamps=[5000 + 100 * n for n in range(5)])


def test_where_reading_begins(store: segmentlog.LogStore) -> None:
    """Reading begins at a word, an offset or a timestamp; the latter two also by partition."""
    filled(store)
    zero, one = TopicPartition("t", 0), TopicPartition("t", 1)
    assert resolved(store) == {zero: 0, one: 0}
    assert resolved(store, startingOffsets="latest") == {zero: 10, one: 5}
    assert resolved(store, startingOffsets='{"t": {"0": 3, "1": -1}}') == {zero: 3, one: 5}
    assert resolved(store, startingOffsets='{"t": {"0": -2, "1": 5}}') == {zero: 0, one: 5}
    assert resolved(store, startingTimestamp="1250") == {zero: 3, one: 0}
    assert resolved(store, startingOffsetsByTimestamp='{"t": {"0": 1900, "1": 5001}}') == {zero: 9, one: 1}


def test_where_reading_ends(store: segmentlog.LogStore) -> None:
    """Reading ends before the first record at or after the timestamp; without such a record, at the end."""
    filled(store)
    assert resolved(store, resolve_ending_offsets) == {("t", 0): 10, ("t", 1): 5}
    assert resolved(store, resolve_ending_offsets, endingTimestamp="5200") == {("t", 0): 10, ("t", 1): 2}
    assert resolved(store, resolve_ending_offsets, endingOffsets='{"t": {"0": 4, "1": -1}}') == {
        ("t", 0): 4,
        ("t", 1): 5,
    }


def test_a_timestamp_after_the_last_record(store: segmentlog.LogStore) -> None:
    """The error names the option for this; with the strategy `latest`, such a partition is read from its end."""
    filled(store)
    with pytest.raises(InvalidConfig, match=r"t/0 has no record at or after that time; .*Strategy = latest"):
        resolved(store, startingTimestamp="4000")
    options = {"startingOffsetsByTimestampStrategy": "latest"}
    assert resolved(store, startingTimestamp="4000", **options) == {("t", 0): 10, ("t", 1): 0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"t": {"0": 1}}', "an entry for each partition that is read; t/1 is missing"),
        ('{"t": {"0": 1, "1": 1, "2": 1}}', "entries for the partitions that are read; t/2 is not among them"),
        ('{"u": {"0": 1}}', "t/0, t/1 are missing"),
    ],
)
@pytest.mark.parametrize("name", ["startingOffsets", "startingOffsetsByTimestamp"])
def test_json_of_other_partitions(store: segmentlog.LogStore, name: str, text: str, told: str) -> None:
    """JSON offsets must name exactly the partitions that are read."""
    filled(store)
    with pytest.raises(InvalidConfig, match=re.escape(told)):
        resolved(store, **{name: text})


def test_offsets_that_are_gone_or_not_there_yet(store: segmentlog.LogStore) -> None:
    """Both are data loss: an error, or with failOnDataLoss = false the nearest existing offset."""
    filled(store)
    store.topic("t").partition(0).trim(4)
    for name, side in (("startingOffsets", resolve_starting_offsets), ("endingOffsets", resolve_ending_offsets)):
        for offset, nearest in ((2, 4), (11, 10)):
            text = json.dumps({"t": {"0": offset, "1": 0}})
            with pytest.raises(DataLoss, match=rf"t/0: offset {offset} is outside the log.*failOnDataLoss"):
                resolved(store, side, **{name: text})
            assert resolved(store, side, **{name: text, "failOnDataLoss": "false"})["t", 0] == nearest


def test_an_end_that_its_readers_do_not_see(store: segmentlog.LogStore) -> None:
    """For readers of durable records, an ending offset after the durable one is not there yet, either."""
    log = store.create_topic("t", fsync="never").partition(0)
    log.append([b"1"], ack="durable")
    log.append([b"2"])
    options = {"endingOffsets": '{"t": {"0": 2}}', "durableOnly": "true"}
    with pytest.raises(DataLoss, match=r"t/0: end offset 2 is after 1"):
        resolved(store, resolve_ending_offsets, **options)
    assert resolved(store, resolve_ending_offsets, **options, failOnDataLoss="false") == {("t", 0): 1}


def test_which_partitions(store: segmentlog.LogStore) -> None:
    """Lists, patterns that match whole names, and single partitions; the store's own topics match no pattern."""
    for name in ("clicks", "clicks-2", "views"):
        store.create_topic(name, partitions=2)
    with store.producer(name="p") as producer, producer.transaction():
        producer.send("views", b"x")
    found = resolved(store, subscribePattern="clicks.*")
    assert sorted({topic for topic, _ in found}) == ["clicks", "clicks-2"]
    assert sorted({topic for topic, _ in resolved(store, subscribePattern="click")}) == []
    assert sorted({topic for topic, _ in resolved(store, subscribePattern=".*")}) == ["clicks", "clicks-2", "views"]
    assert list(resolved(store, subscribe="views,clicks")) == [(t, n) for t in ("clicks", "views") for n in (0, 1)]
    assert list(resolved(store, assign='{"views": [1], "clicks": [0]}')) == [("clicks", 0), ("views", 1)]
    with pytest.raises(UnknownTopic, match="it has no partition 2, only 0 to 1"):
        resolved(store, assign='{"views": [2]}')
    with pytest.raises(UnknownTopic, match=r"it does not exist in .* \(existing topics: clicks, clicks-2, views\)"):
        resolved(store, subscribe="view")


@given(st.dictionaries(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 30)), st.integers(0, 2**62)))
def test_offsets_as_spark_keeps_them(offsets: dict[tuple[str, int], int]) -> None:
    """JSON brings them back, and it is one text for one set of offsets: Spark compares it as text."""
    named = {TopicPartition(*tp): offset for tp, offset in offsets.items()}
    shuffled = dict(reversed(named.items()))
    for ids in ({}, {tp.topic: new_topic_id() for tp in named}):
        assert decode_positions(json.loads(json.dumps(encode_positions(Positions(named, ids))))) == Positions(
            named, ids
        )
        reordered = Positions(shuffled, dict(reversed(ids.items())))
        assert json.dumps(encode_positions(Positions(named, ids))) == json.dumps(encode_positions(reordered))


# ---------------------------------------------------------------- tasks


def boundaries(store: segmentlog.LogStore, topic: str, partition: int) -> set[int]:
    """Return the base offsets of the batches."""
    return {batch.header.base_offset for batch in store.topic(topic).partition(partition).read(0)}


def all_of(store: segmentlog.LogStore, topic: str) -> list[OffsetRange]:
    """Return the offset ranges of all records of a topic."""
    logs = store.topic(topic).partitions()
    return [OffsetRange(topic, log.number, log.log_start_offset, log.log_end_offset) for log in logs]


def check_cover(tasks: list[list[OffsetRange]], ranges: list[OffsetRange]) -> None:
    """Check that the tasks' ranges are the given ones in order, without a gap or an overlap."""
    joined: list[OffsetRange] = []
    for one in (one for task in tasks for one in task):
        assert one.start < one.end
        if joined and (joined[-1].topic, joined[-1].partition) == (one.topic, one.partition):
            assert joined[-1].end == one.start
            joined[-1] = OffsetRange(one.topic, one.partition, joined[-1].start, one.end)
        else:
            joined.append(one)
    assert joined == [one for one in ranges if one.end > one.start]
    assert all(tasks)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[segmentlog.LogStore]:
    """Yield a store with topic "t" of three partitions: batches of all sizes, the last one empty.

    Tests must not change it.
    """
    with segmentlog.open(tmp_path_factory.mktemp("uneven") / "store", background=False) as store:
        topic = store.create_topic("t", partitions=3, fsync="never")
        for number, sizes in enumerate([(1, 50, 7, 100, 3, 3, 3, 200, 1), (40,) * 10]):
            for size in sizes:
                topic.partition(number).append([b""] * size)
        assert len(topic.partitions()) == 3
        yield store


@given(
    st.none() | st.integers(1, 400),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 368), st.integers(0, 368)), min_size=2, max_size=2),
)
def test_tasks_cover_the_ranges(
    uneven: segmentlog.LogStore, least: int | None, most: int | None, cores: int | None, given: list[tuple[int, int]]
) -> None:
    """Exactly, without overlap, whatever is asked for; no task is larger than it may be."""
    ranges = [OffsetRange("t", number, min(pair), max(pair)) for number, pair in enumerate(given)]
    tasks = split_into_tasks(uneven, ranges, at_least=least, max_records=most, cores=cores)
    check_cover(tasks, ranges)
    if most is not None:
        assert max((sum(one.end - one.start for one in task) for task in tasks), default=0) <= most
    total = sum(one.end - one.start for one in ranges)
    if least is not None:
        assert len(tasks) >= min(least, total)


def test_cuts_are_between_batches(uneven: segmentlog.LogStore) -> None:
    """A batch is decoded once: as many tasks as are asked for come first."""
    tasks = split_into_tasks(uneven, [OffsetRange("t", 1, 0, 400)], at_least=4)
    assert len(tasks) == 5
    for (one,) in tasks:
        assert one.start in boundaries(uneven, "t", 1)
    assert len(split_into_tasks(uneven, [OffsetRange("t", 1, 0, 400)], at_least=20)) >= 20


def test_small_ranges_are_one_task(uneven: segmentlog.LogStore) -> None:
    """A task costs more than thousands of records do: what is little is read by one."""
    assert len(split_into_tasks(uneven, all_of(uneven, "t"), cores=16)) == 1
    assert split_into_tasks(uneven, [], cores=16) == []


def test_many_small_partitions_are_packed(store: segmentlog.LogStore) -> None:
    """Two hundred partitions of a few records become few tasks."""
    topic = store.create_topic("t", partitions=200, fsync="never")
    for log in topic.partitions():
        log.append([b"1", b"2", b"3"])
    ranges = all_of(store, "t")
    tasks = split_into_tasks(store, ranges, cores=2)
    check_cover(tasks, ranges)
    assert len(tasks) == 1
    tasks = split_into_tasks(store, ranges, at_least=8)
    check_cover(tasks, ranges)
    assert 8 <= len(tasks) <= 16


def test_a_cut_in_a_hole(store: segmentlog.LogStore) -> None:
    """Offsets that were compacted away or lost do not confuse the planning of tasks."""
    log = store.create_topic("t", cleanup_policy="compact", segment_bytes=1 << 20).partition(0)
    for at in range(100):
        log.append([b"%d" % at], keys=[b"once" if at in (0, 99) else b"same"])
    log.roll()
    log.append([b"end"], keys=[b"end"])
    log.compact()
    ranges = [OffsetRange("t", 0, 0, 60)]
    for least in (2, 3, 7):
        check_cover(split_into_tasks(store, ranges, at_least=least), ranges)
    plain = store.create_topic("u").partition(0)
    plain.append([b"x"] * 50)
    plain.append([b"x"] * 50)
    assert plain.truncate(20) is not None
    plain.append([b"y"] * 50)
    ranges = all_of(store, "u")
    for least in (2, 3, 5, 7):
        check_cover(split_into_tasks(store, ranges, at_least=least), ranges)


@pytest.mark.parametrize("when", ["before", "while"])
def test_what_is_cut_off_after_it_was_planned(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """An error or a warning names the offsets, for a truncation before or during the read, but not for earlier ones."""
    monkeypatch.setattr("segmentlog.spark.arrow_batches._ROWS", 1)
    log = store.create_topic("t").partition(0)
    for number in range(10):
        log.append([b"%d" % number])
    log.truncate(9)
    log.append([b"new"])
    strict, lenient = (
        BatchReader(read(path=store.path, minPartitions="2", failOnDataLoss=loss), columns_of("value binary"))
        for loss in ("true", "false")
    )
    planned = [(reader, reader.partitions()) for reader in (strict, lenient)]
    assert [rows.num_rows for task in planned[0][1] for rows in strict.read(task)] == [1] * 10
    going = {}
    for reader, tasks in planned:
        parts = [reader.read(task) for task in tasks]
        going[reader] = (parts, [next(part) for part in parts] if when == "while" else [])
    log.truncate(4)
    log.append([b"newer"])
    with pytest.raises(DataLoss, match=r"t/0: offsets 4 to \d are gone since .*truncated on request.*failOnDataLoss"):
        list(going[strict][0][0])
    parts, first = going[lenient]
    rest = [rows for part in parts for rows in part]
    assert {b"0", b"1", b"2", b"3"} <= {value for rows in (*first, *rest) for value in rows["value"].to_pylist()}
    assert "t/0: offsets 4 to" in caplog.text


# ---------------------------------------------------------------- to Arrow


def batches(store: segmentlog.LogStore, topic: str = "t") -> list[RecordBatch]:
    """Return the batches of a topic's only partition."""
    return list(store.topic(topic).partition(0).read(0))


FULL = source_schema(include_headers=True)


def test_rows_are_the_records(store: segmentlog.LogStore) -> None:
    """The rows have every column, null keys and values, headers and their absence, in Spark's exact types."""
    log = store.create_topic("t").partition(0)
    headers = [[("a", b"1"), ("b", None)], None]
    log.append([b"v", b""], keys=[None, b"k"], timestamps=[0, 1_700_000_000_123], headers=headers)
    log.append([b"w"], timestamps=[-14_182_940_000])
    log.append([None], keys=[b""])
    (rows,) = ArrowRows(FULL).convert(batches(store))
    assert rows.schema == arrow_schema(FULL)
    records = list(store.consumer("t"))
    assert [row["value"] for row in rows.to_pylist()] == [record.value for record in records] == [b"v", b"", b"w", None]
    assert rows["key"].to_pylist() == [None, b"k", None, b""]
    assert rows["topic"].to_pylist() == ["t"] * 4
    assert rows["partition"].to_pylist() == [0] * 4
    assert rows["offset"].to_pylist() == [0, 1, 2, 3]
    assert rows["timestampType"].to_pylist() == [0] * 4
    stamps = [one.astimezone(datetime.UTC) for one in rows["timestamp"].to_pylist()]
    assert stamps[0] == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert [round(stamp.timestamp() * 1000) for stamp in stamps] == [record.timestamp for record in records]
    assert rows["headers"].to_pylist() == [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, None, None]


@pytest.mark.parametrize("beyond", [1, 2**63 - 1 - (2**63 - 1) // 1000])
def test_a_timestamp_that_spark_has_not(store: segmentlog.LogStore, beyond: int) -> None:
    """It is null: earlier versions stored such records, and the topic's other records are read."""
    log = store.create_topic("t").partition(0)
    log.append([b"a", b"b"], timestamps=[0, LATEST_MS])
    wanted = columns_of("value binary, timestamp timestamp")
    (rows,) = ArrowRows(wanted).convert(batches(store))
    assert rows["timestamp"].cast(pa.int64()).to_pylist() == [0, LATEST_MS * 1000]
    late = LATEST_MS + beyond
    append_unchecked(log, foreign([Sent(None, b"c", 5), Sent(None, b"d", late), Sent(None, b"e", -1)]))
    (rows,) = ArrowRows(wanted).convert(batches(store))
    assert rows["timestamp"].cast(pa.int64()).to_pylist() == [0, LATEST_MS * 1000, 5000, None, -1000]
    (rows,) = ArrowRows(columns_of("value binary, timestamp long")).convert(batches(store))
    assert rows["timestamp"].to_pylist() == [0, LATEST_MS, 5, late, -1]
    assert rows["value"].to_pylist() == [b"a", b"b", b"c", b"d", b"e"]


FILLED_HEADERS = ArrayType(
    StructType([StructField("key", StringType(), False), StructField("value", BinaryType(), False)])
)


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        (StructField("key", StringType(), False), 1),
        (StructField("value", BinaryType(), False), 3),
        (StructField("headers", HEADERS, False), 1),
        (StructField("headers", FILLED_HEADERS), 4),
        (StructField("offset", LongType(), False), None),
        (StructField("headers", ArrayType(HEADERS.elementType, False)), None),
    ],
)
def test_a_column_that_may_not_be_null(store: segmentlog.LogStore, field: StructField, offset: int | None) -> None:
    """If it is null all the same, an error names the record; Spark would fail with a NullPointerException."""
    log = store.create_topic("t").partition(0)
    log.append([b"v"], keys=[b"k"], headers=[[("a", b"1")]])
    log.append([b"v"] * 2)
    log.append([None, b"w"], keys=[b"k"] * 2, headers=[[("a", b"1")], [("a", b"1"), ("b", None)]])
    rows = ArrowRows(StructType([StructField("topic", StringType(), False), field]))
    if offset is None:
        assert sum(one.num_rows for one in rows.convert(batches(store))) == 5
        return
    with pytest.raises(SegmentlogError, match=rf"column '{field.name}' is null at t/0 offset {offset}, .*NOT NULL"):
        list(rows.convert(batches(store)))


def test_log_append_time(store: segmentlog.LogStore) -> None:
    """Records of a topic that stamps them itself say so: timestampType 1, and the log's time."""
    log = store.create_topic("t", message_timestamp_type="LogAppendTime").partition(0)
    log.append([b"v"], timestamps=[5])
    (rows,) = ArrowRows(FULL).convert(batches(store))
    assert rows["timestampType"].to_pylist() == [1]
    assert rows["timestamp"].to_pylist()[0].year > 2000


def test_only_what_is_asked_for_is_decoded(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a schema without values, no value is decoded; a schema of numbers decompresses nothing."""
    log = store.create_topic("t").partition(0)
    log.append([b"v"] * 10, keys=[b"k"] * 10)
    found = batches(store)
    (rows,) = ArrowRows(columns_of("offset long, topic string, timestampType int")).convert(found)
    assert rows.num_rows == 10
    assert found[0]._columns is None

    def never(batch: RecordBatch) -> memoryview:
        raise AssertionError("nobody asked for values")

    monkeypatch.setattr(RecordBatch, "values_column", property(never))
    (rows,) = ArrowRows(columns_of("key binary, timestamp timestamp, partition int")).convert(batches(store))
    assert rows["key"].to_pylist() == [b"k"] * 10
    with pytest.raises(AssertionError, match="nobody asked"):
        list(ArrowRows(columns_of("value binary")).convert(batches(store)))


@given(st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=40), st.data())
def test_parts_of_batches(blobs: list[bytes | None], data: st.DataObject) -> None:
    """A slice of a batch has the same rows as the batch has there, null and empty values included."""
    keys = data.draw(st.lists(st.none() | st.binary(max_size=300), min_size=len(blobs), max_size=len(blobs)))
    start = data.draw(st.integers(0, len(blobs)))
    stop = data.draw(st.integers(start, len(blobs)))
    batch = read_batch(batch_bytes(Columns(blobs, keys)))
    (rows,) = ArrowRows(columns_of("key binary, value binary, offset long")).convert([batch.slice(start, stop), batch])
    assert rows["value"].to_pylist() == blobs[start:stop] + blobs
    assert rows["key"].to_pylist() == keys[start:stop] + keys
    first = batch.header.base_offset
    assert rows["offset"].to_pylist() == [*range(first + start, first + stop), *range(first, first + len(blobs))]


def test_text(store: segmentlog.LogStore) -> None:
    """Keys and values as strings, if they are UTF-8; else the error names the column, the record and the way out."""
    log = store.create_topic("t").partition(0)
    log.append(["grün".encode(), None], keys=[None, b"k"])
    text = columns_of("key string, value string")
    (rows,) = ArrowRows(text).convert(batches(store))
    assert rows.to_pylist() == [{"key": None, "value": "grün"}, {"key": "k", "value": None}]
    log.append([b"fine"])
    log.append([b"fine", b"\xff\xfe"])
    with pytest.raises(
        SegmentlogError, match=r"^the value at t/0 offset 4 is not UTF-8 text; read it as binary, or set"
    ):
        list(ArrowRows(text).convert(batches(store)))
    store.create_topic("u").partition(0).append([b""], keys=[b"\xff"])
    with pytest.raises(SegmentlogError, match=r"^the key at u/0 offset 0 is not UTF-8 text"):
        list(ArrowRows(text).convert(batches(store, "u")))


def test_rows_come_in_batches_of_a_bounded_size(store: segmentlog.LogStore) -> None:
    """Small batches are joined, large ones are not: memory stays flat, whatever the log's batches are."""
    log = store.create_topic("t", fsync="never").partition(0)
    for _ in range(200):
        log.append([b"v"] * 10)
    assert len(list(ArrowRows(FULL).convert(batches(store)))) == 1
    big = store.create_topic("big", fsync="never", compression_type="none").partition(0)
    for _ in range(30):
        big.append([bytes(1_000_000)])
    sizes = [rows.num_rows for rows in ArrowRows(FULL).convert(batches(store, "big"))]
    assert sum(sizes) == 30
    assert max(sizes) <= 8
    # Without values such a batch is small: it holds numbers only.
    assert len(list(ArrowRows(columns_of("offset long")).convert(batches(store, "big")))) == 1


# ---------------------------------------------------------------- from Arrow


def taken(rows: dict[str, Any], topic: str | None = None) -> list[tuple[str, Any, Any]]:
    """(topic, columns, partitions) of such rows."""
    arrays = {name: array if isinstance(array, pa.Array) else pa.array(array) for name, array in rows.items()}
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    return [(name, records.columns(), partitions) for name, records, _, partitions in convert_rows(batch, topic)]


def test_records_of_rows() -> None:
    """Text and bytes, keys, headers, partitions and time stamps arrive as what a producer sends."""
    headers = pa.array(
        [[{"key": "h", "value": b"1"}], None], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    stamps = pa.array([1_000_001, 2_999_999], pa.timestamp("us", tz="UTC"))
    ((topic, columns, partitions),) = taken(
        {"key": ["k", None], "value": [b"v", b""], "headers": headers, "partition": pa.array([3, None], pa.int32()),
         "timestamp": stamps, "topic": ["ignored", None]},
        "given",
    )  # fmt: skip
    assert topic == "given"
    assert list(columns.keys) == [b"k", None]
    assert list(columns.values) == [b"v", b""]
    assert columns.timestamps.tolist() == [1000, 2999]
    assert [list(one) for one in columns.headers] == [[("h", b"1")], []]
    assert partitions.tolist() == [3, -1]


def test_columns_that_are_null_throughout() -> None:
    """They count as missing: records have no keys, the time of writing, and partitions by key."""
    ((_, columns, partitions),) = taken(
        {"key": pa.nulls(2, pa.binary()), "value": [b"1", b"2"], "partition": pa.nulls(2, pa.int32()),
         "timestamp": pa.nulls(2, pa.timestamp("us")),
         "headers": pa.nulls(2, arrow_schema(FULL).field("headers").type)},
        "t",
    )  # fmt: skip
    assert columns.keys is columns.headers is partitions is None
    assert (abs(columns.timestamps - time.time() * 1000) < 60_000).all()


def test_timestamps_of_other_types() -> None:
    """Numbers are milliseconds; null is now; -1 is a record without a timestamp; one before the year 1 is refused."""
    before = datetime.datetime.now().timestamp() * 1000
    ((_, columns, _),) = taken({"value": [b"1", b"2"], "timestamp": pa.array([5, None], pa.int64())}, "t")
    assert columns.timestamps[0] == 5
    assert before - 1 <= columns.timestamps[1] <= before + 60_000
    for unit, factor in (("s", 1), ("ms", 1000), ("us", 10**6), ("ns", 10**9)):
        ((_, columns, _),) = taken({"value": [b"1"], "timestamp": pa.array([7 * factor], pa.timestamp(unit))}, "t")
        assert columns.timestamps.tolist() == [7000]
    stamps = [0, -1, LATEST_MS, EARLIEST_MS]
    for column in (pa.array([stamp * 1000 for stamp in stamps], pa.timestamp("us")), pa.array(stamps, pa.int64())):
        ((_, columns, _),) = taken({"value": [b"1"] * 4, "timestamp": column}, "t")
        assert columns.timestamps.tolist() == stamps
    moon = {"value": [b"1", b"2"], "timestamp": pa.array([-14_182_940_000_001, -1], pa.timestamp("us"))}
    ((_, columns, _),) = taken(moon, "t")
    assert columns.timestamps.tolist() == [-14_182_940_001, -1], "rounded down; the last millisecond of 1969 is none"
    with pytest.raises(InvalidRecord, match=r"timestamp\[1\] is -62135596800001 ms; expected .* the year 1 on"):
        taken({"value": [b"1", b"2"], "timestamp": pa.array([0, -62_135_596_800_001], pa.timestamp("ms"))}, "t")


def test_what_spark_writes_keeps_to_the_limits_of_the_topic() -> None:
    """A timestamp must be one that readers can hold, and as near to the clock as the topic requires."""
    now = time.time_ns() // 1_000_000
    near = TopicConfig(message_timestamp_after_max_ms=1000, message_timestamp_before_max_ms=10_000_000)
    for config, stamp, wrong in (
        (TopicConfig(), LATEST_MS + 1, "the year 294247"),
        (TopicConfig(), 2**63 - 1, "the year 294247"),
        (near, now + 10_000_000, "message.timestamp.after.max.ms = 1s"),
        (near, now - 20_000_000, "message.timestamp.before.max.ms"),
    ):
        ((_, records, _, _),) = convert_rows(
            pa.record_batch({"value": pa.array([b"1", b"2"]), "timestamp": pa.array([now, stamp], pa.int64())}), "t"
        )
        with pytest.raises(InvalidRecord, match=rf"timestamp\[1\] is {stamp} ms; expected .*{wrong}"):
            records.encode(config)
    seconds = pa.record_batch({"value": pa.array([b"1"]), "timestamp": pa.array([2**54], pa.timestamp("s"))})
    ((_, records, _, _),) = convert_rows(seconds, "t")
    with pytest.raises(InvalidRecord, match="the year 294247"):
        records.encode(TopicConfig())


def test_rows_of_several_topics() -> None:
    """The rows are separated by topic, in their order."""
    found = taken(
        {"topic": ["a", "b", "a"], "value": [b"1", b"2", b"3"], "partition": pa.array([0, 1, None], pa.int64())}
    )
    assert [(topic, list(columns.values), numbers.tolist()) for topic, columns, numbers in found] == [
        ("a", [b"1", b"3"], [0, -1]),
        ("b", [b"2"], [1]),
    ]
    assert taken({"topic": pa.array([], pa.string()), "value": pa.array([], pa.binary())}) == []


def test_rows_without_a_topic() -> None:
    """A row must have a topic."""
    with pytest.raises(InvalidRecord, match=r"topic\[1\] is null; expected a topic for each row"):
        taken({"topic": ["a", None], "value": [b"1", b"2"]})


@pytest.mark.parametrize("wrong", [-1, -2, 2**31, -(2**40)])
def test_partitions_that_are_none(wrong: int) -> None:
    """Negative numbers mean nothing to the user: null says 'by key'."""
    with pytest.raises(InvalidRecord, match=rf"partition\[1\] is {wrong}; expected a partition's number"):
        taken({"value": [b"1", b"2"], "partition": pa.array([0, wrong], pa.int64())}, "t")


def test_headers_without_a_name() -> None:
    """A header must have a name."""
    array = pa.array(
        [[{"key": None, "value": b"1"}]], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    with pytest.raises(InvalidRecord, match="header"):
        taken({"value": [b"1"], "headers": array}, "t")


@given(st.lists(st.tuples(st.none() | st.binary(max_size=9), st.binary(max_size=20)), min_size=1, max_size=50))
def test_there_and_back(pairs: list[tuple[bytes | None, bytes]]) -> None:
    """Keys and values go through Arrow unchanged, as bytes."""
    ((_, columns, _),) = taken(
        {"key": pa.array([key for key, _ in pairs], pa.binary()), "value": pa.array([value for _, value in pairs])}, "t"
    )
    assert list(columns.values) == [value for _, value in pairs]
    assert columns.keys is None or list(columns.keys) == [key for key, _ in pairs]
    assert columns.keys is not None or all(key is None for key, _ in pairs)


def test_numpy_is_what_partitions_are() -> None:
    """`Stager.add` gets 32-bit numbers."""
    ((_, _, partitions),) = taken({"value": [b"1"], "partition": pa.array([1], pa.int16())}, "t")
    assert partitions.dtype == np.int32
