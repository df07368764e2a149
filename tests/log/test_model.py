"""A partition against a plain list, through appends, cuts, closes, kills and power cuts in any order."""

from __future__ import annotations

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from logs import FakeClock, Kept, contents, delete_indexes, log_files, machine_dies, open_log
from wire import append_either

from segmentlog.errors import LogTruncated, OffsetOutOfRange
from segmentlog.records import Headers, LostRange
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

BLOBS = st.one_of(st.none(), st.binary(max_size=12), st.just(b"long " * 60))
HEADER = st.tuples(st.sampled_from(["h", "ü"]), st.none() | st.binary(max_size=3))
HEADERS: st.SearchStrategy[Headers] = st.lists(HEADER, max_size=2).map(tuple)
RECORDS = st.lists(st.tuples(BLOBS, BLOBS, st.integers(0, 2**33), HEADERS), min_size=1, max_size=6)


class FastFaults(FaultyFileSystem):
    """Faults on demand, and no waiting for the disk."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("fsync", "fdatasync"):
            setattr(self, name, self._wrap(name, lambda fd: None))


class LogMachine(RuleBasedStateMachine):
    """``records`` is what the log must contain, ``assigned`` every record that ever got an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="segmentlog-model-"))
        self.clock = FakeClock()
        self.records: list[Kept] = []
        self.assigned: dict[int, Kept] = {}
        self.lost: list[LostRange] = []
        self.start = self.end = self.durable = 0
        self.config: dict[str, Any] = {}
        self.fs = FastFaults()
        self.log: Any = None  # a Partition, once `make` has run

    @initialize(
        segment_bytes=st.sampled_from([300, 700, 5000]),
        interval=st.sampled_from([1, 150, 4096]),
        records=st.sampled_from([None, 4]),
    )
    def make(self, segment_bytes: int, interval: int, records: int | None) -> None:
        self.config = {"segment_bytes": segment_bytes, "index_interval_bytes": interval, "segment_records": records}
        self.open()

    def teardown(self) -> None:
        if self.log is not None:
            self.log.close()
        shutil.rmtree(self.folder)

    def open(self, *, lossless: bool = True) -> None:
        """Reopen the partition and compare it with the model."""
        self.fs = FastFaults()
        self.log = open_log(self.folder, fs=self.fs, clock=self.clock, **self.config)
        if lossless:
            assert self.log.recovery_report.lost is None
            assert self.log.log_end_offset == self.end
        self.durable = self.log.durable_offset

    # ------------------------------------------------------------ what a user does

    def columns(self, drawn: list[tuple[Any, ...]]) -> dict[str, Any]:
        keys, values, timestamps, headers = (list(column) for column in zip(*drawn, strict=True))
        return {"values": values, "keys": keys, "timestamps": timestamps, "headers": headers}

    def note_appended(self, base_offset: int, drawn: list[tuple[Any, ...]]) -> None:
        for offset, (key, value, timestamp, headers) in enumerate(drawn, base_offset):
            assert offset not in self.assigned, f"offset {offset} was given to {self.assigned[offset]} before"
            record = Kept(offset, key, value, timestamp, headers)
            self.assigned[offset] = record
            self.records.append(record)
        self.end = base_offset + len(drawn)

    @rule(drawn=RECORDS, ack=st.sampled_from(["written", "durable"]))
    def append(self, drawn: list[tuple[Any, ...]], ack: Any) -> None:
        base_offset = append_either(self.log, *self.columns(drawn).values(), ack=ack)
        assert base_offset == self.end
        self.note_appended(base_offset, drawn)
        if ack == "durable":
            assert self.log.durable_offset == self.end

    @rule()
    def be_idle(self) -> None:
        """Let the descriptor budget close the files of the idle partition."""
        assert self.log.handle.close_if_idle()
        assert self.log.handle.lock_fd < 0

    @rule(drawn=RECORDS, idle=st.booleans(), rolls=st.booleans())
    def another_process_appends(self, drawn: list[tuple[Any, ...]], idle: bool, rolls: bool) -> None:
        """Append as another process; this one finds the new log end, with its files open or closed."""
        if idle:
            self.be_idle()
        other = open_log(self.folder, clock=self.clock, **self.config)
        self.note_appended(append_either(other, *self.columns(drawn).values()), drawn)
        if rolls:
            other.roll()
        other.abandon()

    @rule()
    def flush(self) -> None:
        assert self.log.flush() == self.end

    @rule(data=st.data())
    def read_from_anywhere(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(-1, self.end + 1) | st.sampled_from([self.start, self.end]), "offset")
        if not self.start <= offset <= self.end:
            with pytest.raises(OffsetOutOfRange):
                self.log.read(offset)
            return
        within = [lost for lost in self.lost if max(lost.base_offset, self.start) < offset < lost.end_offset]
        if within:
            with pytest.raises(LogTruncated) as caught:
                self.log.read(offset)
            assert caught.value.lost == within[0]
            return
        assert contents(self.log, offset) == [record for record in self.records if record.offset >= offset]
        durable = [record for record in self.records if offset <= record.offset < self.durable]
        assert contents(self.log, offset, durable_only=True) == durable

    @rule(wanted=st.integers(0, 2**33))
    def look_up_a_time(self, wanted: int) -> None:
        oracle = next((record.offset for record in self.records if record.timestamp >= wanted), None)
        assert self.log.offset_for_timestamp(wanted) == oracle

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, self.end), "offset")
        self.start = max(self.start, offset)
        assert self.log.trim(offset) == self.start
        self.records = [record for record in self.records if record.offset >= self.start]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(max(self.start, self.end - 8), self.end), "offset")
        lost = self.log.truncate(offset)
        assert (lost is None) == (not any(record.offset >= offset for record in self.records) and self.is_gone(offset))
        if lost is not None:
            assert lost.base_offset >= offset
            assert lost.end_offset == self.end + 1, "a consumer that had read to the end must notice"
            self.end = lost.end_offset
            # A range that began after it is part of it from now on.
            self.lost = [*(one for one in self.lost if one.base_offset < lost.base_offset), lost]
        self.records = [record for record in self.records if record.offset < offset]

    def is_gone(self, offset: int) -> bool:
        """Return whether only lost ranges are between ``offset`` and the end."""
        for lost in self.lost:
            if lost.base_offset <= offset < lost.end_offset:
                offset = lost.end_offset
        return offset == self.end

    # ------------------------------------------------------------ how processes and machines end

    @rule()
    def close_and_reopen(self) -> None:
        self.log.close()
        self.open()
        assert self.log.recovery_report.verdict in ("clean", "live", "new")

    @rule()
    def kill_and_reopen(self) -> None:
        self.log.abandon()
        self.open()
        assert self.log.recovery_report.verdict in ("clean", "live", "new")

    @rule(drawn=RECORDS, call=st.integers(1, 12), ack=st.sampled_from(["written", "durable"]))
    def kill_during_an_append(self, drawn: list[tuple[Any, ...]], call: int, ack: Any) -> None:
        """Kill the process during an append: the log has all unacknowledged records of that append, or none."""
        before = self.end
        self.fs.die_at(call)
        try:
            self.log.append(**self.columns(drawn), ack=ack)
            acknowledged = True
        except Died:
            acknowledged = False
        self.log = open_log(self.folder, fs=FastFaults(), clock=self.clock, **self.config)
        assert self.log.recovery_report.lost is None
        assert self.log.log_end_offset in ((before + len(drawn),) if acknowledged else (before, before + len(drawn)))
        if self.log.log_end_offset > before:
            self.note_appended(before, drawn)
        self.open()

    @rule(data=st.data(), call=st.integers(1, 40))
    def kill_during_a_truncation(self, data: st.DataObject, call: int) -> None:
        """Kill the process during a truncation: it is done or not, for this and for another process."""
        others_fs = FastFaults()
        other = open_log(self.folder, fs=others_fs, clock=self.clock, **self.config)
        offset = data.draw(st.integers(max(self.start, self.end - 8), self.end), "offset")
        kept = [record for record in self.records if record.offset < offset]
        self.fs.die_at(call)
        try:
            self.log.truncate(offset)
        except Died:
            pass
        else:
            self.fs.heal()
            self.log.abandon()
        if data.draw(st.booleans(), "go on in the other process"):
            self.log, self.fs = other, others_fs
            base_offset = self.log.append([b"after"], timestamps=[0])
            assert base_offset in (self.end, self.end + 1)
            found = contents(self.log)
            assert found.pop() == Kept(base_offset, None, b"after", 0)
        else:
            self.open(lossless=False)
            found = contents(self.log)
            base_offset = -1
            assert self.log.log_end_offset in (self.end, self.end + 1)
            self.end = self.log.log_end_offset
        assert found in (self.records, kept)
        self.records = found
        self.lost = self.log.lost_ranges()
        if base_offset >= 0:
            self.note_appended(base_offset, [(None, b"after", 0, ())])

    @rule(data=st.data(), kind=st.sampled_from(["nothing", "cut", "zeros", "garbage", "bit"]))
    def power_cut(self, data: st.DataObject, kind: str) -> None:
        """Cut the power: synced records stay, an arbitrary part of the rest is lost, and no offset is reused."""
        durable, before = self.log.durable_offset, self.log.log_end_offset
        places = self.unsynced_bytes(durable)
        machine_dies(self.log)
        if kind != "nothing" and places:
            path, position = data.draw(st.sampled_from(places), "first byte that the disk never got")
            self.spoil(path, position, kind)
        if data.draw(st.booleans(), "indexes are gone"):
            delete_indexes(self.folder)
        self.open(lossless=False)
        report = self.log.recovery_report
        found = contents(self.log)
        assert found == self.records[: len(found)], "what survives is a prefix"
        assert all(record.offset >= durable for record in self.records[len(found) :]), "lost what was durable"
        if kind == "nothing":
            assert found == self.records
        assert self.log.log_end_offset >= before, "offsets that were handed out would be handed out again"
        if report.lost is not None:
            assert report.lost.end_offset == self.log.log_end_offset
            assert report.lost.base_offset >= durable
        else:
            assert self.log.log_end_offset == before
            assert found == self.records
        self.records, self.end = found, self.log.log_end_offset
        self.lost = self.log.lost_ranges()

    def unsynced_bytes(self, durable: int) -> list[tuple[Path, int]]:
        """Places that no fsync has covered: the start, two inner bytes and the last byte of each batch."""
        places = []
        for batch in self.log.read(max(durable, self.start)) if durable < self.end else ():
            path, position = Path(batch._path), batch._position
            places += [(path, position + at) for at in (0, 50, 97, batch.size_bytes - 1)]
        return places

    def spoil(self, path: Path, position: int, kind: str) -> None:
        later = [file for file in log_files(self.folder) if file > path]
        if kind == "bit":
            data = bytearray(path.read_bytes())
            data[position] ^= 0x10
            path.write_bytes(data)
            return
        data = bytearray(path.read_bytes()[:position])
        if kind == "zeros":
            data += bytes(200)
        elif kind == "garbage":
            data += b"SLB\x01 and then nothing that makes sense" * 5
        path.write_bytes(data)
        if kind == "cut":
            for file in later:
                file.unlink()

    @precondition(lambda self: self.end > 0)
    @rule()
    def lose_the_indexes(self) -> None:
        self.log.close()
        delete_indexes(self.folder)
        self.open()

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_log_is_the_list(self) -> None:
        if self.log is None:
            return
        log = self.log
        assert (log.log_start_offset, log.log_end_offset) == (self.start, self.end)
        assert self.durable <= log.durable_offset <= self.end
        self.durable = log.durable_offset
        found = contents(log)
        assert found == self.records
        for record in found:
            assert self.assigned[record.offset] == record

    @invariant()
    def lost_ranges_explain_every_gap(self) -> None:
        if self.log is None:
            return
        ranges = self.log.lost_ranges()
        assert all(one.end_offset <= two.base_offset for one, two in pairwise(ranges))
        missing = self.start
        for offset in [record.offset for record in self.records] + [self.end]:
            while missing < offset:
                lost = next((one for one in ranges if one.base_offset <= missing < one.end_offset), None)
                assert lost is not None, f"nothing tells why offset {missing} is gone"
                missing = lost.end_offset
            assert missing == offset
            missing = offset + 1 if offset < self.end else offset

    @invariant()
    def epochs_ascend(self) -> None:
        if self.log is not None:
            epochs = self.log.epochs()
            assert epochs[-1].epoch == self.log.epoch
            assert all(one.epoch < two.epoch and one.start_offset <= two.start_offset for one, two in pairwise(epochs))


TestLogMachine = pytest.mark.long(LogMachine.TestCase)
TestLogMachine.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
