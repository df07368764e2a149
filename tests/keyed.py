"""The guarantees of compaction about records with keys, as plain functions over lists, and across crashes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from logs import Kept

from segmentlog.config import EXPIRES_HEADER


class Said(NamedTuple):
    """A record as the history of a compacted log stores it."""

    key: bytes | None
    value: bytes | None


def expired(record: Kept, now_ms: int, ttl_ms: int | None) -> bool:
    """Return whether the record has expired, by its own time or by the topic's."""
    own = next((int(value) for name, value in record.headers if name == EXPIRES_HEADER and value), 0)
    return 0 < own <= now_ms or (ttl_ms is not None and record.timestamp + ttl_ms <= now_ms)


def compacted(
    records: Iterable[Kept], end_offset: int, keep_last: int, now_ms: int = 0, ttl_ms: int | None = None
) -> list[Kept]:
    """Return the records that a pass over all offsets below ``end_offset`` leaves, if it drops no tombstone."""
    by_key: dict[bytes, list[Kept]] = defaultdict(list)
    kept = []
    for record in records:
        if record.offset >= end_offset:
            kept.append(record)
        elif record.key is None:
            kept += [] if expired(record, now_ms, ttl_ms) else [record]
        else:
            by_key[record.key].append(record)
    for versions in by_key.values():
        last = versions[-keep_last:]
        dead = [index for index, one in enumerate(last) if one.value is None or expired(one, now_ms, ttl_ms)]
        kept += [one for one in last[dead[-1] if dead else 0 :] if not expired(one, now_ms, ttl_ms)]
    return sorted(kept)


class KeyedHistory:
    """Results that writers and readers of a compacted log got over any number of crashes.

    * An offset never names two different records.
    * The last records of each key exist unless they were lost. Once a tombstone is deleted, no older record of its
      key is returned.
    * A durable record is not in a lost range.
    * Records that a completed pass, a trim or a recovery removed never come back.
    """

    def __init__(self, keep_last: int) -> None:
        self._keep_last = keep_last
        self._first: dict[int, Said] = {}
        self._durable: set[int] = set()
        self._standing: set[int] = set()
        self._gone: set[int] = set()
        self.log_start_offset = 0
        self.conflicts: list[str] = []

    def told(self, base_offset: int, records: Sequence[Said], *, durable: bool) -> None:
        """Note that an append returned."""
        for offset, record in enumerate(records, base_offset):
            self.named(offset, record, durable=durable)

    def named(self, offset: int, record: Said, *, durable: bool = False) -> None:
        """Note that a writer or a reader got this record at this offset."""
        first = self._first.setdefault(offset, record)
        if first != record:
            self.conflicts.append(f"one offset, two records: {offset} was {first}, is {record}")
        if offset in self._gone:
            self.conflicts.append(f"a record that was gone for good is back: {offset} {record}")
        self._standing.add(offset)
        if durable:
            self._durable.add(offset)

    def is_known(self, offset: int) -> bool:
        """Return whether any process got a record at that offset."""
        return offset in self._first

    def withdrawn(self, offset: int, shown: Mapping[int, Said], replaced: Iterable[range] = ()) -> None:
        """Note that a process is about to truncate the log: only the records in ``shown`` below ``offset`` are
        promised.

        A copy of the offsets in ``replaced`` is about to be put in place, and the truncation cannot stop that. The copy
        omits records that have a newer record after ``offset``, although ``shown`` has them.
        """
        for named, record in shown.items():
            self.named(named, record)
        cut = {record.key for named, record in shown.items() if named >= offset}
        going = {named for offsets in replaced for named in offsets if named in shown and shown[named].key in cut}
        self._standing &= {named for named in shown if named < offset} - going
        self._durable &= self._standing

    def settled(self, shown: Mapping[int, Said], end_offset: int | None = None) -> None:
        """Note that exactly these records remain below ``end_offset`` durably: after a recovery or a pass."""
        for named, record in shown.items():
            self.named(named, record)
        for named in self._first:
            if named not in shown and (end_offset is None or named < end_offset):
                self._gone.add(named)
        if end_offset is None:
            self._standing = set(shown)
            self._durable &= self._standing

    def trimmed(self, offset: int) -> None:
        """Note that a trim or a retention run returned."""
        self.log_start_offset = max(self.log_start_offset, offset)

    def check(
        self, shown: Mapping[int, Said], lost_ranges: Sequence[tuple[int, int]], log_start_offset: int
    ) -> list[str]:
        """Compare the history with the records that the log returns now."""
        if log_start_offset < self.log_start_offset:
            self.conflicts.append(f"the log starts at {log_start_offset}, and was trimmed to {self.log_start_offset}")
        for offset, record in shown.items():
            self.named(offset, record)
        by_key: dict[bytes | None, list[int]] = defaultdict(list)
        for offset in sorted(self._standing):
            if offset < log_start_offset:
                continue
            if offset not in shown and any(base <= offset < end for base, end in lost_ranges):
                if offset in self._durable:
                    self.conflicts.append(f"durable, and lost: {offset} {self._first[offset]}")
                continue
            by_key[self._first[offset].key].append(offset)
        for key, offsets in by_key.items():
            self._check_key(key, offsets, shown)
        return self.conflicts

    def _check_key(self, key: bytes | None, offsets: list[int], shown: Mapping[int, Said]) -> None:
        last = offsets if key is None else offsets[-self._keep_last :]
        for index in range(len(last) - 1, -1, -1):
            offset = last[index]
            if self._first[offset].value is None and key is not None:
                older = [one for one in offsets if one < offset and one in shown]
                if offset not in shown and older:
                    self.conflicts.append(f"key {key!r}: the tombstone at {offset} is gone, and {older} are shown")
                return
            if offset not in shown:
                self.conflicts.append(f"key {key!r}: {offset} of {offsets} is gone, {sorted(shown)[-3:]} are there")
