"""Import and export, through the command line and back."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import segmentlog
from segmentlog.cli import cli as command_line
from segmentlog.cli.common import run
from segmentlog.exchange.record_files import FieldNames, TransferError, records_of
from segmentlog.quantities import LATEST_MS
from segmentlog.testing.ports import free_ports


def cli(store: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command line on a store."""
    command = [sys.executable, "-m", "segmentlog", "--dir", str(store), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


def content(store: Path, topic: str) -> list[tuple[Any, ...]]:
    """Return the records of a topic without their offsets."""
    with segmentlog.open(store, create=False, read_only=True) as opened:
        return [(one.key, one.value, one.timestamp, one.headers) for one in opened.consumer(topic)]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Return a store with a topic that has every kind of record, and an empty topic."""
    path = tmp_path / "store"
    with segmentlog.open(path) as store:
        partition = store.create_topic("from").partition(0)
        partition.append(
            [b"text", b"\xff\x00binary", None, b"", "ü".encode()],
            keys=[b"k", None, b"\xfe", b"", None],
            timestamps=[5, 1_700_000_000_000, 7, 8, 9],
            headers=[[("a", b"1"), ("a", None)], None, [("b", b"\xff")], None, None],
        )
        store.create_topic("to")
    return path


@pytest.mark.parametrize("ending", ["ndjson", "parquet"])
def test_export_then_import_gives_the_same_records(filled: Path, tmp_path: Path, ending: str) -> None:
    """Keys, values, timestamps and headers come back as they were, binary and nulls included."""
    file = tmp_path / f"records.{ending}"
    assert cli(filled, "export", "from", str(file)).returncode == 0
    done = cli(filled, "import", str(file), "to")
    assert done.returncode == 0, done.stderr
    assert content(filled, "to") == content(filled, "from")


def test_csv_is_for_text(filled: Path) -> None:
    """Text goes to CSV and back by the names of its columns; binary is refused in one line."""
    refused = cli(filled, "export", "from", "--format", "csv")
    assert refused.returncode == 1
    assert b"offset 1 is not UTF-8" in refused.stderr
    rows = b"name,when,amount\nada,2026-01-01T00:00:00Z,1.5\nbob,1000,2\n"
    done = cli(
        filled, "import", "-", "to", "--format", "csv", "--key", "name", "--whole", "--timestamp", "when", stdin=rows
    )
    assert done.returncode == 0, done.stderr
    found = content(filled, "to")
    assert [(key, timestamp) for key, _, timestamp, _ in found] == [(b"ada", 1767225600000), (b"bob", 1000)]
    assert json.loads(found[0][1]) == {"name": "ada", "when": "2026-01-01T00:00:00Z", "amount": "1.5"}
    exported = cli(filled, "export", "to", "--format", "csv", "--from", "1")
    assert exported.stdout.splitlines()[0] == b"partition,offset,timestamp,key,value,headers"
    assert exported.stdout.splitlines()[1].startswith(b"0,1,1000,bob,")


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        (("--format", "ndjson"), b"{not json}\n", b"line 1 is not JSON"),
        (("--format", "ndjson"), b"[1]\n", b"line 1 is not a JSON object"),
        (("--format", "ndjson"), b'{"other": 1}\n', b"no field 'value' (it has: other)"),
        (("--format", "ndjson"), b'{"value_base64": "?"}\n', b"value_base64 is not base64"),
        (("--format", "ndjson"), b'{"value": "x", "timestamp": "soon"}\n', b"'soon' is not a timestamp"),
        (("--format", "csv"), b"value\na,b\n", b"line 2 has 2 columns"),
        (("--format", "csv"), b"value\n\xff\n", b"not UTF-8"),
        (("--format", "parquet"), b"", b"Parquet can be read from a file only"),
        (("--whole", "--value", "x"), b"", b"exclude each other"),
    ],
)
def test_bad_input_is_told_in_a_line(filled: Path, arguments: tuple[str, ...], stdin: bytes, told: bytes) -> None:
    """An import error names the record and the reason, and nothing of the record is appended."""
    done = cli(filled, "import", "-", "to", *arguments, stdin=stdin)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert b"Traceback" not in done.stderr
    assert content(filled, "to") == []


def test_a_file_that_is_no_parquet(filled: Path, tmp_path: Path) -> None:
    """A file of another kind is refused in one line, and an empty topic exports to an empty file."""
    (tmp_path / "x.parquet").write_bytes(b"nothing of the kind")
    done = cli(filled, "import", str(tmp_path / "x.parquet"), "to")
    assert done.returncode == 1
    assert b"not a readable Parquet file" in done.stderr
    assert cli(filled, "export", "to", str(tmp_path / "empty.parquet")).returncode == 0
    assert cli(filled, "import", str(tmp_path / "empty.parquet"), "to").returncode == 0
    assert content(filled, "to") == []


# ---------------------------------------------------------------- there and back

EXAMPLES = int(os.environ.get("SEGMENTLOG_TRANSFER_EXAMPLES", "30"))
PARTITIONS = 3

_text = st.one_of(st.text(max_size=8), st.text('",\r\n\0 ;ax\ufeff\u2028\x85', max_size=6)).map(str.encode)
_blob = st.one_of(st.none(), st.just(b""), _text, st.binary(max_size=6))
_texts = st.one_of(st.none(), st.just(b""), _text)
_stamp = st.one_of(
    st.integers(-1, LATEST_MS),
    st.sampled_from([-1, 0, 1, 2**53 + 1, 253_402_300_799_999, 253_402_300_800_000, LATEST_MS]),
)
_headers = st.lists(st.tuples(st.sampled_from(["", "a", "b", 'ü,"\n']), _blob), max_size=3)


def _records(blob: st.SearchStrategy[bytes | None]) -> st.SearchStrategy[list[Any]]:
    """Return records of several partitions: (partition, key, value, timestamp, headers)."""
    partition = st.integers(0, PARTITIONS - 1)
    return st.lists(st.tuples(partition, blob, blob, _stamp, st.one_of(st.just([]), _headers)), max_size=12)


class There:
    """A store in which every trip there and back has topics of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def cli(self, *arguments: str) -> tuple[int, str]:
        """(exit status, stderr) of a command, in this process."""
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            status = run(command_line, ["--dir", str(self.folder / "store"), *arguments])
        return status, err.getvalue()

    def back(self, records: list[Any], ending: str, *more: str) -> tuple[Any, Any, Path, int, str]:
        """Return (records as appended, as imported, the file, the export's status and output), by partition."""
        self.count += 1
        topics = f"from-{self.count}", f"to-{self.count}"
        with segmentlog.open(self.folder / "store") as store:
            for topic in topics:
                store.create_topic(topic, partitions=PARTITIONS)
            for partition, key, value, timestamp, headers in records:
                store.topic(topics[0]).partition(partition).append(
                    [value], keys=[key], timestamps=[timestamp], headers=[headers]
                )
        file = self.folder / f"{self.count}.{ending}"
        status, err = self.cli("export", topics[0], str(file), *more)
        if status == 0:
            imported, said = self.cli("import", str(file), topics[1])
            assert imported == 0, said
        with segmentlog.open(self.folder / "store", read_only=True) as store:
            found = [
                [[(one.key, one.value, one.timestamp, one.headers) for one in store.consumer((topic, number))]
                 for number in range(PARTITIONS)]
                for topic in topics
            ]  # fmt: skip
            for topic in topics:
                store.topic(topic)
        return *found, file, status, err


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> There:
    """Return the folder where round trips start."""
    return There(tmp_path_factory.mktemp("there"))


@pytest.mark.long
@pytest.mark.parametrize("ending", ["ndjson", "parquet", "ndjson.gz"])
@given(records=_records(_blob))
@example(records=[(2, None, None, LATEST_MS, [("a", None), ("a", b""), ("a", b"\xff")]), (0, b"", b"", 0, [])])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_record_survives_the_trip(there: There, ending: str, records: list[Any]) -> None:
    """Nulls, empty and binary keys and values, any header, any timestamp, each in its partition and in order."""
    before, after, _, status, err = there.back(records, ending)
    assert (status, after) == (0, before), err


@pytest.mark.long
@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
@given(records=_records(_texts))
@example(
    records=[(1, None, None, LATEST_MS, [("a", None), ("a", b"\xff")]), (1, b"", b"", 0, []), (1, b'"', b"\r", 5, [])]
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_survives_csv(there: There, ending: str, records: list[Any]) -> None:
    """A tombstone stays one, an empty text too, and headers, whatever is in them."""
    before, after, _, status, err = there.back(records, ending)
    assert (status, after) == (0, before), err


@pytest.mark.long
@given(records=_records(_blob))
@example(records=[(0, None, b"text", 1, []), (1, None, b"\xff", 1, [])])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_csv_holds_it_or_refuses_it(there: There, records: list[Any]) -> None:
    """CSV either contains every record unchanged, or the export fails and there is no file."""

    def is_text(data: bytes | None) -> bool:
        with contextlib.suppress(UnicodeDecodeError):
            return data is None or data.decode() is not None
        return False

    before, after, file, status, err = there.back(records, "csv")
    if all(is_text(key) and is_text(value) for _, key, value, _, _ in records):
        assert (status, after) == (0, before), err
    else:
        assert (status, file.exists()) == (1, False)
        assert "is not UTF-8, and CSV can hold only text" in err


def test_a_large_value_survives_csv(there: There) -> None:
    """A value may be longer than the csv module accepts by default."""
    before, after, _, status, err = there.back([(0, b"k", b'x"\n' * 100_000, 5, [])], "csv")
    assert (status, after) == (0, before), err


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_other_writers(there: There, unit: str) -> None:
    """Parquet has them in four units; halves of a millisecond are rounded up."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ticks = {"s": [0, 5], "ms": [0, 5000], "us": [0, 4_999_500], "ns": [0, 4_999_500_000]}[unit]
    table = pa.table({"value": ["a", "b"], "timestamp": pa.array(ticks, pa.timestamp(unit))})
    pq.write_table(table, there.folder / f"{unit}.parquet")
    with segmentlog.open(there.folder / "store") as store:
        store.create_topic(f"units-{unit}")
    status, err = there.cli("import", str(there.folder / f"{unit}.parquet"), f"units-{unit}")
    assert status == 0, err
    assert [one[2] for one in content(there.folder / "store", f"units-{unit}")] == [0, 5000]


def test_a_date_that_python_has_not_is_told(there: There) -> None:
    """A timestamp after the year 9999 that becomes part of a value causes an error of one line."""
    file = there.folder / "far.ndjson"
    file.write_text('{"value":"a","timestamp":9223372036854775}\n')
    with segmentlog.open(there.folder / "store") as store:
        store.create_topic("far")
        store.create_topic("far-copy")
    assert there.cli("import", str(file), "far")[0] == 0
    assert there.cli("export", "far", str(there.folder / "far.parquet"))[0] == 0
    status, err = there.cli("import", "--whole", str(there.folder / "far.parquet"), "far-copy")
    assert status == 1
    assert "outside the range of Python's types" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "fields", [FieldNames(whole=True), FieldNames(value="odd"), FieldNames(value="plain", key="odd")]
)
def test_a_value_that_json_has_not_is_told(fields: FieldNames) -> None:
    """The error has the number of the record, for all values that readers of files produce."""
    documents: list[dict[str, Any]] = [{"plain": "a", "odd": 1}, {"plain": "b", "odd": 1j}]
    with pytest.raises(TransferError, match=r"record 2: .*JSON.*1j is complex"):
        list(records_of(iter(documents), fields, 10))


def test_nanoseconds_become_text(there: There) -> None:
    """Within a value, times and durations in nanoseconds are JSON text, whatever pyarrow returns for them."""
    pytest.importorskip("pandas")  # needs pandas: pyarrow has a type for them only with it
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "at": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        "utc": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", tz="UTC")),
        "took": pa.array([1_000_000_001], pa.duration("ns")),
    }
    pq.write_table(pa.table(columns), there.folder / "nano.parquet")
    with segmentlog.open(there.folder / "store") as store:
        store.create_topic("nano")
    for more in (("--whole",), ("--value", "took", "--key", "at")):
        status, err = there.cli("import", *more, str(there.folder / "nano.parquet"), "nano")
        assert status == 0, err
    (_, whole, _, _), (key, value, _, _) = content(there.folder / "store", "nano")
    at, took = "2023-11-14T22:13:20.123456789", "P0DT0H0M1.000000001S"
    assert json.loads(whole) == {"at": at, "utc": f"{at}+00:00", "took": took}
    assert (json.loads(key), json.loads(value)) == (at, took)


@pytest.mark.parametrize(("size_bytes", "groups"), [(1, 3), (200_000, 2)])
def test_groups_of_rows_are_not_those_of_the_log(
    there: There, monkeypatch: pytest.MonkeyPatch, size_bytes: int, groups: int
) -> None:
    """Many small batches are few groups in Parquet, by rows and by bytes: a group for each record is 1 KiB a record."""
    import pyarrow.parquet as pq

    monkeypatch.setattr("segmentlog.exchange.parquet_file._GROUP_ROWS", 10)
    monkeypatch.setattr("segmentlog.exchange.parquet_file._GROUP_BYTES", 3 << 20)
    records = [(0, b"%d" % number, b"x" * size_bytes, number, []) for number in range(25)]
    if size_bytes > 1:
        monkeypatch.setattr("segmentlog.exchange.parquet_file._GROUP_ROWS", 1000)
    before, after, file, status, err = there.back(records, "parquet")
    assert (status, after) == (0, before), err
    assert pq.ParquetFile(file).num_row_groups == groups


# ---------------------------------------------------------------- partitions, --skip


@pytest.mark.parametrize("ending", ["ndjson", "csv", "parquet"])
def test_partitions_come_back_or_are_refused(tmp_path: Path, ending: str) -> None:
    """A topic with fewer partitions gets no records, unless --by-key chooses partitions by key."""
    store, file = tmp_path / "store", str(tmp_path / f"x.{ending}")
    with segmentlog.open(store) as opened:
        for topic, count in (("from", 4), ("same", 4), ("fewer", 2)):
            opened.create_topic(topic, partitions=count)
        for number in range(40):
            opened.topic("from").partition(number % 4).append([b"%d" % number], keys=[b"%d" % number])
    assert cli(store, "export", "from", file).returncode == 0
    assert cli(store, "import", file, "same").returncode == 0
    done = cli(store, "import", file, "fewer")
    assert done.returncode == 1
    assert b"names partition 2, but fewer has partitions 0 to 1" in done.stderr
    assert b"--by-key" in done.stderr
    assert content(store, "fewer") == []
    assert cli(store, "import", "--by-key", file, "fewer").returncode == 0
    with segmentlog.open(store, read_only=True) as opened:
        for number in range(4):
            read = [[one.value for one in opened.consumer((topic, number))] for topic in ("from", "same")]
            assert read[0] == read[1]
    assert sorted(content(store, "fewer")) == sorted(content(store, "from"))


@pytest.mark.parametrize("partition", ['"x"', "-1", "1.5", "true", "99999999999"])
def test_a_partition_that_is_none_is_told(filled: Path, partition: str) -> None:
    """An invalid partition causes an error of one line; --by-key ignores the field."""
    stdin = b'{"value":"a","partition":%b}\n' % partition.encode()
    done = cli(filled, "import", "-", "to", stdin=stdin)
    assert done.returncode == 1
    assert b"record 1: " in done.stderr
    assert b"is not a partition; ignore" in done.stderr
    assert cli(filled, "import", "--by-key", "-", "to", stdin=stdin).returncode == 0


@pytest.mark.parametrize(
    "value", ["-62135596800001", "9223372036854775808", "true", '"-62135596800001"', '"1e400"', "1e400"]
)
def test_a_timestamp_that_is_none_is_told(filled: Path, value: str) -> None:
    """An invalid timestamp is neither replaced by the current time nor rounded."""
    done = cli(filled, "import", "-", "to", stdin=b'{"value":"a","timestamp":%b}\n' % value.encode())
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert content(filled, "to") == []


@pytest.mark.parametrize("ending", ["ndjson", "csv", "parquet"])
def test_an_import_goes_on_where_it_failed(tmp_path: Path, ending: str) -> None:
    """The error has the number of appended records. --skip leaves out exactly those, and a bad record in addition."""
    store, file = tmp_path / "store", str(tmp_path / f"x.{ending}")
    with segmentlog.open(store) as opened:
        topic = opened.create_topic("from", max_message_bytes=10_000)
        opened.create_topic("to", max_message_bytes=1000)
        for number in range(30):
            topic.partition(0).append([b"x" * 2000 if number == 20 else b"%d" % number])
    assert cli(store, "export", "from", file).returncode == 0
    done = cli(store, "import", "--batch-size", "7", file, "to")
    assert done.returncode == 1
    assert b"record 21 takes" in done.stderr
    assert b"the first 20 records were appended; resume with --skip 20" in done.stderr
    done = cli(store, "import", "--batch-size", "7", "--skip", "20", file, "to")
    assert b"record 21 takes" in done.stderr
    assert cli(store, "import", "--batch-size", "7", "--skip", "21", file, "to").returncode == 0
    values = [one[1] for one in content(store, "to")]
    assert values == [b"%d" % number for number in range(30) if number != 20]
    assert cli(store, "import", "--skip", "1000", file, "to").returncode == 0
    assert len(content(store, "to")) == 29


def test_a_line_that_is_no_json_can_be_left_out(filled: Path) -> None:
    """Skipped lines are not parsed."""
    stdin = b'{"value":"a"}\n\n{oops\n{"value":"b"}\n'
    done = cli(filled, "import", "--batch-size", "1", "-", "to", stdin=stdin)
    assert b"line 3 is not JSON" in done.stderr
    assert b"resume with --skip 1" in done.stderr
    assert cli(filled, "import", "--skip", "2", "-", "to", stdin=stdin).returncode == 0
    assert [one[1] for one in content(filled, "to")] == [b"a", b"b"]


# ---------------------------------------------------------------- csv of others, gzip


def test_empty_fields_of_a_csv_are_told(filled: Path) -> None:
    """An empty field is null, an empty text is in quotes; that there are tombstones is said, and --whole has texts."""
    rows = b'key,value,note\r\na,,\r\nb,"",""\r\n,"x\r\ny",\r\n'
    done = cli(filled, "import", "--format", "csv", "-", "to", stdin=rows)
    assert done.returncode == 0
    assert b"1 of their values are null: empty fields without quotes" in done.stderr
    assert [one[:2] for one in content(filled, "to")] == [(b"a", None), (b"b", b""), (None, b"x\r\ny")]
    assert cli(filled, "import", "--format", "csv", "--whole", "-", "to", stdin=rows).returncode == 0
    assert json.loads(content(filled, "to")[3][1]) == {"key": "a", "value": "", "note": ""}


@pytest.mark.parametrize("rows", [b'value\n"a', b'value,key\n"a"b,c\n'])
def test_a_csv_that_was_cut_is_told(filled: Path, rows: bytes) -> None:
    """Quotes that are not closed are the end of half a file."""
    done = cli(filled, "import", "--format", "csv", "-", "to", stdin=rows)
    assert done.returncode == 1
    assert b"the file is not CSV: line 2" in done.stderr


def test_gzip_is_written_and_read(filled: Path, tmp_path: Path) -> None:
    """The ending selects gzip; a truncated file is an error, and gzip of Parquet is wrong usage."""
    file = tmp_path / "x.ndjson.gz"
    assert cli(filled, "export", "from", str(file)).returncode == 0
    plain = cli(filled, "export", "from").stdout
    assert gzip.decompress(file.read_bytes()) == plain
    first = file.read_bytes()
    assert cli(filled, "export", "from", str(file)).returncode == 0
    assert file.read_bytes() == first, "the same records, the same bytes"
    file.write_bytes(first[:-9])
    done = cli(filled, "import", str(file), "to")
    assert done.returncode == 1
    assert b"is not a gzip file, or is incomplete" in done.stderr
    file.write_bytes(b"nothing of the kind")
    done = cli(filled, "import", str(file), "to")
    assert (done.returncode, b"is not a gzip file" in done.stderr) == (1, True)
    for name in ("x.parquet.gz", "x.csv.zst", "x.bz2", "x.zip"):
        for arguments in (("export", "from", name), ("import", name, "to")):
            assert cli(filled, *arguments).returncode == 2


# ---------------------------------------------------------------- whole or not at all


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Return a store whose export takes a while, and whose CSV export fails at the end."""
    with segmentlog.open(tmp_path / "many") as store:
        partition = store.create_topic("t").partition(0)
        for number in range(100):
            partition.append([b"%d-%d" % (number, one) for one in range(1000)])
        partition.append([b"\xff"])
    return tmp_path / "many"


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_refused_export_leaves_no_half(many: Path, tmp_path: Path, before: bytes | None) -> None:
    """The file is unchanged, and no temporary file remains."""
    file = tmp_path / "folder" / "x.csv"
    file.parent.mkdir()
    if before is not None:
        file.write_bytes(before)
    assert cli(many, "export", "t", str(file)).returncode == 1
    assert [path.name for path in file.parent.iterdir()] == ([] if before is None else ["x.csv"])
    assert before is None or file.read_bytes() == before


@pytest.mark.parametrize(
    ("ending", "number"),
    [("ndjson", signal.SIGKILL), ("csv.gz", signal.SIGKILL), ("parquet", signal.SIGKILL), ("csv", signal.SIGTERM),
     ("parquet", signal.SIGINT)],
)  # fmt: skip
def test_an_export_that_is_ended_leaves_no_half(
    many: Path, tmp_path: Path, ending: str, number: signal.Signals
) -> None:
    """After a kill or a stop at any time, a file of that name is complete; other leftovers cannot be imported."""
    file = tmp_path / "folder" / f"x.{ending}"
    file.parent.mkdir()
    command = [sys.executable, "-m", "segmentlog", "--dir", str(many), "export", "t", str(file), "--to", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        ends = time.monotonic() + 20
        while not list(file.parent.iterdir()) and time.monotonic() < ends:
            time.sleep(0.001)
        process.send_signal(number)
        process.wait(20)
    left = list(file.parent.iterdir())
    if file.exists():
        assert cli(many, "export", "t", "--to", "100000", str(tmp_path / f"again.{ending}")).returncode == 0
        assert file.read_bytes() == (tmp_path / f"again.{ending}").read_bytes()
    elif number == signal.SIGKILL:
        (half,) = left
        done = cli(many, "import", str(half), "t")
        assert done.returncode == 2
        assert b"is a temporary file of a killed export" in done.stderr
        assert cli(many, "export", "t", str(file), "--to", "100000").returncode == 0
        assert list(file.parent.iterdir()) == [file], "what was left is used up"
    else:
        assert left == []
        assert process.returncode == 128 + number


@pytest.mark.parametrize("ending", ["ndjson", "csv", "parquet", "ndjson.gz"])
@pytest.mark.parametrize("harm", ["refused", "changed", "lost"])
def test_an_export_is_verified_by_what_imports_it(
    there: There, monkeypatch: pytest.MonkeyPatch, ending: str, harm: str
) -> None:
    """If import would reject, change or miss a record, there is no file, and the error says why."""
    module, name = {"ndjson": ("record_files", "NdjsonWriter"), "csv": ("csv_file", "CsvWriter")}.get(
        ending.removesuffix(".gz"), ("parquet_file", "ParquetWriter")
    )
    writer = getattr(importlib.import_module(f"segmentlog.exchange.{module}"), name)
    write = writer.write

    def write_wrong(self: Any, batch: Any) -> None:
        if harm == "lost":
            batch = batch.slice(0, 1)
        elif harm == "changed":
            batch.timestamps[-1] += 1
        write(self, batch)

    def refuse(*_: object) -> None:
        raise TransferError("record 1: nobody takes it")

    if harm == "refused":
        monkeypatch.setattr("segmentlog.exchange.record_files._add", refuse)
    else:
        monkeypatch.setattr(writer, "write", write_wrong)
    with segmentlog.open(there.folder / "store") as store:
        topic = f"verified-{ending}-{harm}"
        store.create_topic(topic).partition(0).append([b"a", b"b"], timestamps=[1, 2])
    file = there.folder / f"{topic}.{ending}"
    status, err = there.cli("export", topic, str(file))
    refused, differs = "cannot be imported: record 1: nobody takes it", "the written records differ from the topic"
    told = refused if harm == "refused" else differs
    assert status == 1
    assert told in err
    assert [path.name for path in there.folder.iterdir() if topic in path.name] == []
    assert there.cli("export", "--no-verify", topic, str(file))[0] == 0
    assert file.exists()


def test_what_is_no_file_is_written_to_as_it_is(many: Path, tmp_path: Path) -> None:
    """A pipe, a device, what the shell opened: nothing is renamed over them."""
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cat", tmp_path / "fifo"], stdout=subprocess.PIPE) as reader:
        assert cli(many, "export", "t", str(tmp_path / "fifo"), "--to", "5").returncode == 0
        assert reader.stdout is not None
        assert reader.stdout.read().count(b"\n") == 5
    assert cli(many, "export", "t", "/dev/null").returncode == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert cli(many, "export", "t", "/dev/stdout", "--to", "5").stdout.count(b"\n") == 5


def test_a_file_in_memory_is_a_file(many: Path, memory_path: Path) -> None:
    """This holds for any place where it is mounted, such as /dev."""
    file = memory_path / "x.ndjson"
    file.write_bytes(b"what was there")
    inode = file.stat().st_ino
    assert cli(many, "export", "t", str(file), "--to", "5").returncode == 0
    assert file.stat().st_ino != inode, "another file took its place"
    assert list(memory_path.iterdir()) == [file]


def test_a_link_and_permissions_stay(many: Path, tmp_path: Path) -> None:
    """The file that a link leads to is replaced, and may be read by the same people."""
    file, link = tmp_path / "private", tmp_path / "link.ndjson"
    file.write_bytes(b"old")
    file.chmod(0o600)
    link.symlink_to(file)
    assert cli(many, "export", "t", str(link), "--to", "5").returncode == 0
    assert link.is_symlink()
    assert file.read_bytes().count(b"\n") == 5
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


# ---------------------------------------------------------------- kafkaesque


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """Provide a redis-server on a free port, with nothing in it."""
    server = shutil.which("redis-server")
    if server is None:
        if os.environ.get("CI") == "true":
            pytest.fail("redis-server is not installed, and in CI it must be")
        pytest.skip("redis-server is not installed")
    port = free_ports()
    process = subprocess.Popen(
        [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def test_a_kafkaesque_topic_is_taken_over(tmp_path: Path, redis_port: int) -> None:
    """The topic gets the settings, and records keep their order; expired pages are reported, not replaced."""
    import redis

    client = redis.Redis(port=redis_port)
    client.hset("clicks", mapping={"size": 3, "max": 10, "ttl": 60})
    for page in range(3):
        client.zadd("clicks/pages", {str(page): page * 3})
        if page:  # the first one has expired
            client.rpush(f"clicks/pages/{page}", *[f"record {page * 3 + index}" for index in range(3)])
    store = tmp_path / "store"
    done = cli(store, "import", f"redis://127.0.0.1:{redis_port}/0", "clicks")
    assert done.returncode == 0, done.stderr
    assert b"has offset 3 in Redis, and gets offset 0 in clicks" in done.stderr
    assert [value for _, value, _, _ in content(store, "clicks")] == [b"record %d" % number for number in range(3, 9)]
    with segmentlog.open(store) as opened:
        config = opened.topic("clicks").config
        assert (config.segment_records, config.retention_segments, config.retention_closed_ms) == (3, 10, 60_000)
    missing = cli(store, "import", f"redis://127.0.0.1:{redis_port}/0", "nope")
    assert missing.returncode == 1
    assert b"kafkaesque topic 'nope' does not exist" in missing.stderr


def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    """Without a server the error is one line and not a traceback."""
    done = cli(tmp_path / "store", "import", "redis://127.0.0.1:1/0", "clicks")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("field", ["key", "value", "headers"])
def test_large_records_are_gathered_by_their_bytes(field: str) -> None:
    """A list of records is complete with 16 MiB, or with ``size`` small records. No record is lost."""
    large = "x" * (6 << 20)
    content = [{"name": "h", "value": large}] if field == "headers" else large
    documents = [{"value": str(number), field: content} for number in range(7)]
    documents += [{"value": str(number)} for number in range(7, 20)]
    lists = list(records_of(iter(documents), FieldNames(), 10))
    assert [len(rows) for rows in lists] == [3, 3, 10, 4]
    found = [value for rows in lists for value in rows.values if value is not None and len(value) < 3]
    assert found == [b"%d" % number for number in range(7 if field == "value" else 0, 20)]
