"""Spark reads the batches of Kafka's clients."""

from __future__ import annotations

from pathlib import Path

import pytest
from unreadable import KINDS, append_unreadable
from wire import append_sent

import segmentlog
from segmentlog import UnreadableBatch
from segmentlog.spark.arrow_batches import ArrowRows
from segmentlog.spark.batch_reader import BatchReader
from segmentlog.spark.schema import source_schema
from segmentlog.spark.source_options import parse_read_options


def test_a_clients_batch_has_its_keys_and_values(tmp_path: Path) -> None:
    """Beside batches of the library, with keys and without."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"1", b"2"], keys=[b"a", None])
        append_sent(log, [b"value", b"keyless", None], [b"key", None, b"null"])
        log.append([b"3"])
        (rows,) = ArrowRows(source_schema(include_headers=True)).convert(log.read(0))
    assert rows["key"].to_pylist() == [b"a", None, b"key", None, b"null", None]
    assert rows["value"].to_pylist() == [b"1", b"2", b"value", b"keyless", None, b"3"]


def test_what_cannot_be_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The task that comes to it says which offsets; with skipDamaged all others come, however the work is cut."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        log = store.create_topic("t").partition(0)
        for kind in KINDS:
            log.append([kind.encode()])
            append_unreadable(log, kind)
    for more in ({}, {"minPartitions": "5"}, {"maxRecordsPerPartition": "2"}):
        options = {"path": str(tmp_path / "s"), "subscribe": "t", **more}
        reader = BatchReader(parse_read_options(options, streaming=False), source_schema(include_headers=False))
        tasks = reader.partitions()
        with pytest.raises(UnreadableBatch) as caught:
            [list(reader.read(task)) for task in tasks]
        assert caught.value.offset % 4 == 1
        options |= {"skipDamaged": "true"}
        reader = BatchReader(parse_read_options(options, streaming=False), source_schema(include_headers=False))
        rows = [batch for task in reader.partitions() for batch in reader.read(task)]
        values = [value for batch in rows for value in batch["value"].to_pylist()]
        assert values == [kind.encode() for kind in KINDS]
    assert "t/0: skipped offsets 1 to 3" in caplog.text
