"""A batch that claims more than the topic ever allowed is not decompressed."""

from __future__ import annotations

from pathlib import Path

import pytest
from batches import batch_bytes, forge

import segmentlog
from segmentlog.errors import CorruptBatch, PartitionFailed
from segmentlog.format.batch_codecs import CODEC_LZ4


def test_a_forged_size_is_refused_before_it_costs_memory(tmp_path: Path) -> None:
    """Checksums are right, and 64 MiB are claimed in a topic of 1 MiB batches."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t").partition(0).append([b"x" * 1000])
    raw = 64 << 20
    data = forge(batch_bytes([b"x" * 400_000], codec=CODEC_LZ4), raw_size=raw, values_size=raw)
    (path,) = (tmp_path / "store" / "t" / "0").glob("*.log")
    path.write_bytes(data.ljust(path.stat().st_size, b"\0"))
    with segmentlog.open(tmp_path / "store") as store, pytest.raises(CorruptBatch) as told:
        next(iter(store.topic("t").partition(0).read(0)))
    assert told.value.position == 0


def test_batches_stay_readable_when_the_limit_is_lowered_or_raised(tmp_path: Path) -> None:
    """Batches that an earlier limit allowed stay readable; a reader sees a limit that another process raised."""
    big = b"x" * 300_000
    with segmentlog.open(tmp_path / "store") as store:
        log = store.create_topic("t", max_message_bytes=400_000).partition(0)
        log.append([big])
        store.alter_topic("t", {"max.message.bytes": "1KiB"})
    with segmentlog.open(tmp_path / "store") as store, segmentlog.open(tmp_path / "store") as other:
        log = store.topic("t").partition(0)
        assert [batch.values for batch in log.read(0)] == [[big]]
        other.alter_topic("t", {"max.message.bytes": "2MiB"})
        other.topic("t").partition(0).append([big * 3])
        assert [len(value) for batch in log.read(1) for value in batch.values if value] == [900_000]


def test_a_log_that_has_used_up_its_numbers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No offset beyond the range of a batch header is assigned."""
    monkeypatch.setattr("segmentlog.log.append.appender._OFFSET_MAX", 1000)
    with segmentlog.open(tmp_path / "store") as store:
        log = store.create_topic("t").partition(0)
        with pytest.raises(PartitionFailed, match="used up its numbers"):
            log.append([b"x"])
