"""A store with batches of the library and of Kafka's clients: every reader returns their records."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from logs import Kept
from wire import CODECS, append_sent

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.log.partition import Partition

HEADERS = [(("h", b"1"), ("n", None)), (), ()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with the same records in three topics: columns, Kafka's batches, and both by turns."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        for topic in ("columns", "kafka", "both"):
            log = store.create_topic(topic, cleanup_policy="compact", segment_records=7).partition(0)
            for number in range(20):
                as_kafka = topic == "kafka" or (topic == "both" and number % 2 == 1)
                put(log, number, codec=number % len(CODECS) if as_kafka else None)
    return tmp_path / "store"


def put(log: Partition, number: int, codec: int | None) -> None:
    """Append three records: a value, a tombstone, and a record whose key is unique."""
    values = [b"value %d" % number * 9, None, b""]
    keys = [b"key %d" % (number % 4), b"key %d" % (number % 5), b"only %d" % number]
    times = [1000 + number, 2000 - number, 3000]
    if codec is None:
        log.append(values, keys, times, HEADERS)
    else:
        append_sent(log, values, keys, times, HEADERS, codec=codec)


@pytest.mark.parametrize("compacted", [False, True])
def test_everything_reads_the_same(folder: Path, compacted: bool) -> None:
    """Records, tables, Arrow, times: of each topic the same, before and after a compaction and a reopening."""
    if compacted:
        with segmentlog.open(folder, background=False) as store:
            for topic in ("columns", "kafka", "both"):
                store.topic(topic).partition(0).compact()
    with segmentlog.open(folder, background=False) as store:
        seen = []
        for topic in ("columns", "kafka", "both"):
            log = store.topic(topic).partition(0)
            items = sorted(store.table(topic).items())
            arrow = pa.Table.from_batches([batch.to_arrow() for batch in log.read(0)]).combine_chunks()
            seen.append(
                (
                    [
                        Kept(one.offset, one.key, one.value, one.timestamp, one.headers)
                        for one in store.consumer(topic, start="earliest")
                    ],
                    items,
                    arrow.to_pylist(),
                    [log.offset_for_timestamp(at) for at in (0, 1010, 1990, 2500, 4000)],
                )
            )
        assert seen[0] == seen[1] == seen[2]
        assert len(seen[0][0]) > 20


def test_commands(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exports are equal, verify finds nothing, and dump names the layout and its codec."""
    exported = []
    for topic in ("columns", "kafka", "both"):
        assert run(cli, ["--dir", str(folder), "export", topic]) == 0
        exported.append(capfd.readouterr().out.replace(f'"topic":"{topic}"', "").splitlines())
    assert exported[0] == exported[1] == exported[2]
    assert exported[0]
    assert run(cli, ["--dir", str(folder), "verify"]) == 0
    capfd.readouterr()
    assert run(cli, ["--dir", str(folder), "dump", str(folder / "kafka" / "0" / f"{0:020}.log")]) == 0
    shown = capfd.readouterr().out
    assert "Kafka none" in shown
    assert "Kafka gzip" in shown
