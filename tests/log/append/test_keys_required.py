"""Records of a compacted topic must have keys."""

from __future__ import annotations

from pathlib import Path

import pytest

import segmentlog


@pytest.mark.parametrize("fsync", ["never", "always"])
@pytest.mark.parametrize(("keys", "index"), [(None, 0), ([b"a", None, b"c"], 1)])
def test_records_without_a_key_are_refused(
    tmp_path: Path, fsync: str, keys: list[bytes | None] | None, index: int
) -> None:
    """The call appends all records or none. The error names the record and the reason. An empty key is a key."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        log = store.create_topic("t", cleanup_policy="compact", fsync=fsync).partition(0)
        with pytest.raises(segmentlog.InvalidRecord, match=r"compacted \(cleanup.policy\)") as raised:
            log.append([b"1", b"2", b"3"], keys=keys)
        assert (raised.value.column, raised.value.index) == ("keys", index)
        assert log.append([b"1"], keys=[b""]) == 0
        store.alter_topic("t", cleanup_policy="delete")
        log.append([b"1"])


def test_a_producer_refuses_a_record_without_a_key(tmp_path: Path) -> None:
    """The record is refused at once, with its batch; a record accepted before keys were required fails later."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t", cleanup_policy="compact")
        store.create_topic("later")
        producer = store.producer(linger_ms=0)
        with pytest.raises(segmentlog.InvalidRecord, match="compacted"):
            producer.send("t", b"value")
        assert producer.send("t", b"value", key=b"k").result().offset == 0
        producer = store.producer(linger_ms=1000)
        delivery = producer.send("later", b"value")
        store.alter_topic("later", cleanup_policy="compact")
        with pytest.raises(segmentlog.InvalidRecord, match="compacted"):
            delivery.result()
        with pytest.raises(segmentlog.InvalidRecord, match="compacted"):
            producer.close()
