"""Producers and transactions of a partition: sequences, epochs, markers, and what every open finds again."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import FakeClock, open_log
from seeds import seeds

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.errors import OutOfOrderSequence, ProducerFenced
from segmentlog.format.file_names import ABORTED_SUFFIX, SNAPSHOT_SUFFIX
from segmentlog.format.producer_snapshot import (
    NAMED_ID_END,
    SEQUENCE_END,
    AbortedTransaction,
    MalformedProducerFile,
    ProducerEntry,
    SequenceRun,
    decode_aborted,
    decode_snapshot,
    encode_aborted,
    encode_snapshot,
)
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.store import LogStore
from segmentlog.testing.simulated_disk import SimulatedDisk

NAMED, UNNAMED = 7, NAMED_ID_END + 7


def put(log: Partition, sequence: int, count: int = 1, *, who: int = NAMED, epoch: int = 0, txn: bool = False) -> int:
    """Append records whose values name their producer and sequence."""
    values: list[bytes | None] = [b"%d:%d" % (who, sequence + at) for at in range(count)]
    keys: list[bytes | None] = [b"%d" % ((sequence + at) % 5) for at in range(count)]
    return log.append(values, keys, producer=ProducerStamp(who, epoch, sequence, txn))


def values_of(log: Partition, isolation: Any = "read_uncommitted") -> list[bytes | None]:
    """Return all values that a reader with this isolation gets."""
    return [value for batch in log.read(log.log_start_offset, isolation=isolation) for value in batch.values]


def known(log: Partition) -> list[tuple[Any, ...]]:
    """Return what the log knows of its producers, without times."""
    return [(one.producer_id, one.epoch, one.runs, one.wraps, one.transaction_offset) for one in log.producers()]


# ---------------------------------------------------------------- sequences


def test_a_batch_that_comes_again_has_its_first_offset(tmp_path: Path) -> None:
    """It holds after records of other producers, and for a batch split differently."""
    log = open_log(tmp_path)
    assert [put(log, 0, 3), put(log, 3, 2)] == [0, 3]
    log.append([b"another"])
    assert put(log, 5, 1) == 6
    assert [put(log, 0, 3), put(log, 3, 2), put(log, 5, 1)] == [0, 3, 6]
    assert put(log, 1, 4) == 1  # other batch boundaries do not matter: the records are the same
    assert log.log_end_offset == 7


def test_a_gap_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """The error names the expected sequence, and a batch with that sequence is still accepted."""
    log = open_log(tmp_path)
    put(log, 0, 3)
    for sequence, count in ((4, 1), (2, 2), (SEQUENCE_END - 1, 1)):
        with pytest.raises(OutOfOrderSequence) as caught:
            put(log, sequence, count)
        assert (caught.value.expected, caught.value.found) == (3, sequence)
    assert log.log_end_offset == 3
    assert put(log, 3) == 3


def test_only_the_last_runs_are_remembered(tmp_path: Path) -> None:
    """A batch older than five runs is indistinguishable from a gap."""
    log = open_log(tmp_path)
    for sequence in range(10):
        put(log, sequence)
        log.append([b"in between"])
    assert [put(log, sequence) for sequence in (5, 6, 7, 8, 9)] == [10, 12, 14, 16, 18]
    with pytest.raises(OutOfOrderSequence):
        put(log, 4)


def test_a_marker_may_begin_an_epoch(tmp_path: Path) -> None:
    """A producer that counts from 0 in each epoch: its new batches are not taken for those of the last epoch."""
    log = open_log(tmp_path, **{"segment.bytes": "1kb"})
    for epoch in range(3):
        put(log, 0, 2, who=UNNAMED, epoch=epoch, txn=True)
        put(log, 2, who=UNNAMED, epoch=epoch, txn=True)
        assert put(log, 2, who=UNNAMED, epoch=epoch, txn=True) == 4 * epoch + 2
        assert log.end_transaction(UNNAMED, epoch + 1, committed=True) == 4 * epoch + 3
        for again in (log, open_log(tmp_path, **{"segment.bytes": "1kb"})):
            with pytest.raises(OutOfOrderSequence) as caught:
                put(again, 2, who=UNNAMED, epoch=epoch + 1, txn=True)
            assert (caught.value.expected, caught.value.found) == (0, 2)
            with pytest.raises(ProducerFenced):
                put(again, 3, who=UNNAMED, epoch=epoch, txn=True)
    log.roll()
    (entry,) = decode_snapshot((tmp_path / f"{log.log_end_offset:020}{SNAPSHOT_SUFFIX}").read_bytes())
    assert (entry.epoch, entry.runs, entry.restarts_sequence) == (3, (), True)
    assert len(values_of(log)) == 9


def test_a_name_counts_on_behind_a_marker(tmp_path: Path) -> None:
    """The library's names count over all epochs."""
    log = open_log(tmp_path)
    put(log, 0, 3, txn=True)
    log.end_transaction(NAMED, 1, committed=False)
    assert put(log, 3, epoch=1) == 4
    assert put(log, 3, epoch=1) == 4


def test_what_nobody_counts_is_appended_each_time(tmp_path: Path) -> None:
    """Batches with sequence -1, such as offsets committed in a transaction, are never duplicates."""
    log = open_log(tmp_path)
    for offset in range(3):
        assert put(log, -1, who=UNNAMED, txn=True) == offset
    log.end_transaction(UNNAMED, 1, committed=True)
    with pytest.raises(ProducerFenced):
        put(log, -1, who=UNNAMED, txn=True)
    assert put(log, -1, who=UNNAMED, epoch=1, txn=True) == 4


@pytest.mark.parametrize("split", [0, 1, 3, 7])
def test_sequences_wrap_at_their_end(tmp_path: Path, split: int) -> None:
    """As in Kafka, 0 follows 2^31 - 1, also within a batch."""
    log = open_log(tmp_path)
    first = SEQUENCE_END - split
    assert put(log, first % SEQUENCE_END, 7) == 0
    following = (first + 7) % SEQUENCE_END
    assert put(log, following, 2) == 7
    assert put(log, following, 2) == 7
    assert put(log, first % SEQUENCE_END, 7) == 0
    (entry,) = log.producers()
    assert entry.last_number == (0 if split == 0 else SEQUENCE_END) + following + 1 == first % SEQUENCE_END + 8
    log.close()
    assert known(open_log(tmp_path)) == [(NAMED, 0, entry.runs, entry.wraps, -1)]


def test_a_newer_epoch_fences_the_older(tmp_path: Path) -> None:
    """The new epoch may continue the sequence or begin at 0; any other sequence is refused."""
    log = open_log(tmp_path)
    put(log, 0, 2)
    assert put(log, 2, epoch=1) == 2  # counts on
    assert put(log, 0, epoch=2) == 3  # starts again at 0, as Kafka's do
    with pytest.raises(ProducerFenced) as caught:
        put(log, 3, epoch=1)
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    with pytest.raises(OutOfOrderSequence):
        put(log, 5, epoch=3)
    assert log.log_end_offset == 4


def test_a_call_of_many_batches_counts_as_one(tmp_path: Path) -> None:
    """Batches that follow each other in sequence and offset are one run, also across segments."""
    log = open_log(tmp_path, segment_records=10, segment_bytes=600, max_message_bytes=300)
    assert put(log, 0, 75) == 0
    assert len(log.segments()) > 5
    assert put(log, 0, 75) == 0
    assert put(log, 75, 30) == 75
    assert log.log_end_offset == 105
    fresh = open_log(tmp_path, segment_records=10, segment_bytes=600, max_message_bytes=300)
    assert known(fresh) == known(log) == [(NAMED, 0, (SequenceRun(0, 0, 105),), 0, -1)]


def test_threads_with_producers_of_their_own(tmp_path: Path) -> None:
    """Each record is appended once, although threads repeat appends."""
    log = open_log(tmp_path)

    def work(who: int) -> None:
        for sequence in range(0, 100, 2):
            offset = put(log, sequence, 2, who=who)
            assert put(log, sequence, 2, who=who) == offset

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = values_of(log)
    assert len(found) == len(set(found)) == 400


def test_two_processes_share_what_is_known(tmp_path: Path) -> None:
    """Each process derives the producers from the log, also across rolls by the other process."""
    one, two = (open_log(tmp_path, segment_bytes=500) for _ in range(2))
    for sequence in range(60):
        first, second = (one, two) if sequence % 3 else (two, one)
        offset = put(first, sequence)
        assert put(second, sequence) == offset
    assert known(one) == known(two)
    with pytest.raises(OutOfOrderSequence):
        put(one, 61)


# ---------------------------------------------------------------- state across opens


@pytest.mark.parametrize("lost", ["nothing", "snapshots", "damaged snapshots", "checkpoint"])
def test_what_is_known_is_found_again(tmp_path: Path, lost: str) -> None:
    """This holds after a restart of the machine, with and without snapshots."""
    log = open_log(tmp_path, segment_bytes=700)
    for sequence in range(40):
        put(log, sequence, who=NAMED, txn=sequence > 30)
        put(log, sequence, who=UNNAMED)
    log.end_transaction(NAMED, 0, committed=False)
    put(log, 40, who=NAMED, txn=True)
    before, stable = known(log), log.last_stable_offset
    assert stable == log.log_end_offset - 1
    log.close()
    for file in tmp_path.iterdir():
        if file.suffix == SNAPSHOT_SUFFIX and lost == "snapshots":
            file.unlink()
        if file.suffix == SNAPSHOT_SUFFIX and lost == "damaged snapshots":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    if lost == "checkpoint":
        (tmp_path / "checkpoint").unlink()
    (tmp_path / "state").unlink()  # as after a machine's death, or on a copy
    again = open_log(tmp_path, segment_bytes=700)
    assert known(again) == before
    assert again.last_stable_offset == stable
    assert len(values_of(again)) == 81
    assert len(values_of(again, "read_committed")) == 71
    assert put(again, 39, who=UNNAMED) < stable
    with pytest.raises(OutOfOrderSequence):
        put(again, 41, who=UNNAMED)


def test_retention_does_not_forget_producers(tmp_path: Path) -> None:
    """After the segments with their batches are deleted, the next segment's snapshot has the producers."""
    log = open_log(tmp_path, segment_bytes=400)
    put(log, 0, 5)
    while len(log.segments()) < 4:
        log.append([b"x" * 50])
    before = known(log)
    log.trim(log.segments()[-1].base_offset)
    log.close()
    (tmp_path / "state").unlink()
    assert known(open_log(tmp_path, segment_bytes=400)) == before


def test_producers_without_a_name_are_forgotten_after_a_while(tmp_path: Path) -> None:
    """Producers with a name, and with an open transaction, are retained."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, producer_id_expiration_ms=1000)
    put(log, 0, who=UNNAMED)
    put(log, 0, who=NAMED)
    put(log, 0, who=UNNAMED + 1, txn=True)
    clock.advance(1001)
    assert [one.producer_id for one in log.producers()] == [NAMED, UNNAMED + 1]
    assert put(log, 0, who=UNNAMED) == 3  # unknown again: any sequence will do
    assert put(log, 0, who=NAMED) == 1


def test_a_named_producer_is_forgotten_once_no_name_has_its_id(tmp_path: Path) -> None:
    """A log keeps an id that a name owns, so that a yearly job continues; ids below 2^61 without a name expire."""
    clock = FakeClock()
    with LogStore(tmp_path, background=False, clock=clock) as store:
        store.create_topic("t", producer_id_expiration_ms=1000)
        log = store.topic("t").partition(0)
        for number in range(3):
            log.append([b"%d" % number], producer=ProducerStamp(number, 0, 0))
        with store.producer(name="job") as job:
            job.send("t", b"a").result()
        named_id = store.transactions.states()["job"].producer_id
        clock.advance(1001)
        assert [one.producer_id for one in log.producers()] == [named_id]
        log.roll()
        assert [one.producer_id for one in decode_snapshot(_snapshots(tmp_path)[-1].read_bytes())] == [named_id]
    with LogStore(tmp_path, background=False, clock=clock) as store:
        log = store.topic("t").partition(0)
        assert named_id in [one.producer_id for one in log.producers()]  # the names are not read yet
        store.finish_transactions()
        with store.producer(name="job") as job:
            assert job.last_sequence("t", 0) == 0
            assert job.send("t", b"b").result().offset == 4
        clock.advance(1001)
        assert [one.producer_id for one in log.producers()] == [named_id]
        store.transactions._abandoned.delete_name("job")
        clock.advance(1001)
        assert log.producers() == []


def test_what_has_expired_leaves_the_memory_with_a_roll(tmp_path: Path) -> None:
    """Clients come and go, each with an id of its own: a process that appends for months keeps the active ones."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, producer_id_expiration_ms=1000)
    for number in range(50):
        put(log, 0, who=UNNAMED + number)
    put(log, 0, who=UNNAMED + 99, txn=True)
    clock.advance(1001)
    put(log, 0, who=UNNAMED + 50)
    log.roll()
    put(log, 1, who=UNNAMED + 50)
    assert sorted(log._appender._states._entries) == [UNNAMED + 50, UNNAMED + 99]
    assert put(log, 0, who=UNNAMED + 50) == 51
    assert log.last_stable_offset == 50


def _snapshots(folder: Path) -> list[Path]:
    return sorted((folder / "t/0").glob(f"*{SNAPSHOT_SUFFIX}"))


def test_verify_accepts_that_an_id_without_a_name_is_forgotten(tmp_path: Path) -> None:
    """A snapshot that lacks it is not reported; one that lacks a producer which was just active is."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, producer_id_expiration_ms=1000)
    log.append([b"before"])
    put(log, 0, who=NAMED)
    clock.advance(500)
    log.append([b"later"])
    log.roll()
    (path,) = [one for one in tmp_path.glob(f"*{SNAPSHOT_SUFFIX}") if decode_snapshot(one.read_bytes())]
    path.write_bytes(encode_snapshot([]))
    log.append([b"in the next segment"])
    config = TopicConfig(producer_id_expiration_ms=1000)

    def reported() -> list[str]:
        found = inspect_partition(log.handle.fs, str(tmp_path), "t", 0, config, Tally())
        return [one.what for one in found.findings if "is missing" in one.what]

    assert len(reported()) == 1
    clock.advance(1001)
    log.append([b"much later"])
    log.roll()
    log.append([b"in the last segment"])
    for one in tmp_path.glob(f"*{SNAPSHOT_SUFFIX}"):
        one.write_bytes(encode_snapshot([]))
    assert len(reported()) == 1  # of the older snapshot still


def test_a_log_without_producers_has_no_snapshots(tmp_path: Path) -> None:
    """A log pays only for what it uses."""
    log = open_log(tmp_path, segment_bytes=300)
    for _ in range(30):
        log.append([b"x" * 50])
    assert not list(tmp_path.glob("*" + SNAPSHOT_SUFFIX))
    assert log.producers() == []


# ---------------------------------------------------------------- transactions


def test_read_committed_sees_neither_open_nor_aborted_data(tmp_path: Path) -> None:
    """It ends before the first open transaction, and skips aborted records."""
    log = open_log(tmp_path)
    log.append([b"plain"])
    put(log, 0, 2, who=1, txn=True)
    put(log, 0, 2, who=2, txn=True)
    log.append([b"later"])
    assert log.last_stable_offset == 1
    assert values_of(log, "read_committed") == [b"plain"]
    assert log.end_transaction(2, 0, committed=True) == 6
    assert log.last_stable_offset == 1  # the first transaction is still open
    assert log.end_transaction(1, 0, committed=False) == 7
    assert log.last_stable_offset == log.log_end_offset == 8
    assert values_of(log, "read_committed") == [b"plain", b"2:0", b"2:1", b"later"]
    assert values_of(log) == [b"plain", b"1:0", b"1:1", b"2:0", b"2:1", b"later"]
    assert log.end_transaction(1, 0, committed=False) is None


def test_an_abort_behind_the_stable_offset_is_known(tmp_path: Path) -> None:
    """The marker is at an offset that readers do not reach yet."""
    log = open_log(tmp_path)
    put(log, 0, who=1, txn=True)
    put(log, 0, who=2, txn=True)
    log.end_transaction(1, 0, committed=False)
    assert log.last_stable_offset == 1
    assert values_of(log, "read_committed") == []


def test_the_marker_of_an_older_epoch_is_refused(tmp_path: Path) -> None:
    """A zombie coordinator decides nothing; a newer one fences its producer."""
    log = open_log(tmp_path)
    put(log, 0, epoch=3, txn=True)
    with pytest.raises(ProducerFenced):
        log.end_transaction(NAMED, 2, committed=True)
    assert log.end_transaction(NAMED, 4, committed=False) == 1  # the process that aborts it fences it
    with pytest.raises(ProducerFenced):
        put(log, 1, epoch=3, txn=True)


@pytest.mark.parametrize("lost", ["nothing", "indexes", "state"])
def test_a_transaction_that_spans_rolls(tmp_path: Path, lost: str) -> None:
    """The marker is segments after its data, with and without the cache files."""
    log = open_log(tmp_path, segment_bytes=400)
    for sequence in range(30):
        put(log, sequence, who=1, txn=True)
        put(log, sequence, who=2, txn=True)
    log.end_transaction(1, 0, committed=False)
    log.end_transaction(2, 0, committed=True)
    log.append([b"end"])
    wanted = [b"2:%d" % number for number in range(30)] + [b"end"]
    assert len(log.segments()) > 3
    assert values_of(log, "read_committed") == wanted
    log.close()
    for file in tmp_path.iterdir():
        if (lost == "indexes" and file.suffix in (SNAPSHOT_SUFFIX, ABORTED_SUFFIX)) or file.name == lost:
            file.unlink()
    for read_only in (True, False):
        again = open_log(tmp_path, segment_bytes=400, read_only=read_only)
        assert values_of(again, "read_committed") == wanted
        assert again.last_stable_offset == again.log_end_offset
        again.close()


def test_a_reader_is_told_of_aborts_that_came_while_it_read(tmp_path: Path) -> None:
    """The aborts come through another handle on the same log."""
    log, other = open_log(tmp_path), open_log(tmp_path)
    seen: list[bytes | None] = []
    position = 0
    for round_number in range(20):
        put(other, round_number, txn=True)
        other.end_transaction(NAMED, 0, committed=round_number % 2 == 0)
        for batch in log.read(position, isolation="read_committed"):
            seen += batch.values
        position = log.last_stable_offset
    assert seen == [b"7:%d" % number for number in range(0, 20, 2)]


def test_control_batches_are_handed_out_when_asked_for(tmp_path: Path) -> None:
    """Only readers that ask for control batches get them; a search by time finds none."""
    log = open_log(tmp_path)
    put(log, 0, txn=True)
    log.end_transaction(NAMED, 0, committed=True)
    assert [batch.header.is_control for batch in log.read(0, control=True)] == [False, True]
    assert [batch.header.is_control for batch in log.read(0)] == [False]
    assert log.offset_for_timestamp(0) == 0


# ---------------------------------------------------------------- compaction


def test_compaction_drops_aborted_data_and_keeps_sequences(tmp_path: Path) -> None:
    """Even without any snapshot the log records the sequence of each producer."""
    settings = {"cleanup_policy": "compact", "segment_bytes": 500, "delete_retention_ms": 0}
    log = open_log(tmp_path, **settings)
    for number in range(30):
        put(log, 2 * number, 2, who=1, txn=True)
        log.end_transaction(1, 0, committed=number % 3 != 0)
        put(log, number, who=UNNAMED)
    before = values_of(log, "read_committed")
    log.roll()
    report = log.compact()
    assert report.records_after < report.records_before / 3
    last: dict[bytes | None, bytes | None] = {}
    for value in before:
        _, _, number = value.partition(b":")  # type: ignore[union-attr]
        last[b"%d" % (int(number) % 5)] = value
    assert sorted(map(bytes, filter(None, values_of(log, "read_committed")))) == sorted(filter(None, last.values()))
    wanted = [(one[0], one[1], one[2][-1].sequence + one[2][-1].count, one[4]) for one in known(log)]
    for _ in range(2):  # the second pass removes the markers
        log.roll()
        log.compact()
        for file in tmp_path.glob("*" + SNAPSHOT_SUFFIX):
            file.unlink()
        log.close()
        (tmp_path / "state").unlink()
        log = open_log(tmp_path, **settings)
        found = [(one[0], one[1], one[2][-1].sequence + one[2][-1].count, one[4]) for one in known(log)]
        assert found == wanted
        assert log.last_stable_offset == log.log_end_offset
        log.append([b"so that there is something to roll"], [b"k"])
    markers = [batch for batch in log.read(0, control=True) if batch.header.is_control]
    assert len(markers) <= 5  # markers of the runs that the log still remembers
    assert put(log, 30, who=UNNAMED) == log.log_end_offset - 1
    with pytest.raises(OutOfOrderSequence):
        put(log, 62, who=1)


def test_compaction_does_not_go_beyond_an_open_transaction(tmp_path: Path) -> None:
    """Until it is decided, it is unknown which records of a key count."""
    log = open_log(tmp_path, cleanup_policy="compact", segment_bytes=300)
    for number in range(10):
        log.append([b"%d" % number], [b"k"])
    put(log, 0, txn=True)
    for number in range(20):
        log.append([b"%d" % number], [b"k"])
    log.roll()
    log.compact()
    assert log.cleaned_offset <= 10
    assert len(values_of(log)) > 20
    log.end_transaction(NAMED, 0, committed=False)
    log.append([b"last"], [b"k"])
    log.roll()
    log.compact()
    assert values_of(log) == [b"last"]


@pytest.mark.parametrize("seed", seeds("transactions compacted", range(5)))
def test_random_transactions_compacted_again_and_again(tmp_path: Path, seed: int) -> None:
    """`read_committed` returns the last committed record of each key, whatever is lost in between."""
    rng = random.Random(seed)
    settings = {"cleanup_policy": "compact", "segment_bytes": 400, "delete_retention_ms": 0, "file_delete_delay_ms": 0}
    log = open_log(tmp_path, **settings)
    sequences, table = dict.fromkeys(range(3), 0), {}
    writes: dict[int, dict[bytes, tuple[int, bytes]]] = {who: {} for who in range(3)}
    for step in range(250):
        who = rng.randrange(3)
        action = rng.random()
        if action < 0.6:
            key, value = b"%d" % rng.randrange(6), b"%d-%d" % (who, step)
            offset = log.append([value], [key], producer=ProducerStamp(who, 0, sequences[who], True))
            sequences[who] += 1
            writes[who][key] = (offset, value)
        elif action < 0.8:
            committed = rng.random() < 0.6
            log.end_transaction(who, 0, committed=committed)
            if committed:
                for key, found in writes[who].items():
                    table[key] = max(table.get(key, found), found)
            writes[who] = {}
        elif action < 0.9:
            log.roll()
            log.compact(buffer_bytes=rng.choice((100, 10_000)))
        elif action < 0.95:
            log.close()
            for file in tmp_path.iterdir():
                if file.suffix in (SNAPSHOT_SUFFIX, ABORTED_SUFFIX) and rng.random() < 0.5:
                    file.unlink()
            (tmp_path / "state").unlink()
            log = open_log(tmp_path, **settings)
        if step % 10 == 0:
            assert [(one.producer_id, one.next_sequence) for one in log.producers()] == [
                (one, number) for one, number in sequences.items() if number
            ]
            seen = {
                key: (int(offset), value)
                for batch in log.read(0, isolation="read_committed")
                for key, offset, value in zip(batch.keys, batch.offsets, batch.values, strict=True)
            }
            stable = log.last_stable_offset
            assert {key: found for key, found in table.items() if found[0] < stable}.items() >= {
                key: found for key, found in seen.items() if table.get(key) == found
            }.items()
            for key, found in table.items():
                assert found[0] >= stable or seen[key] == found, (step, key)


# ---------------------------------------------------------------- crashes


@pytest.mark.parametrize("seed", seeds("crashed producers", (5,)))
def test_a_power_cut_at_any_call_keeps_sequences_and_decisions(seed: int) -> None:
    """In every crash state the producers match the batches in the log, and appends continue."""
    config = TopicConfig(segment_bytes=600, fsync="always")  # type: ignore[arg-type]
    folder = "/store/t/0"
    disk = SimulatedDisk()
    disk.make_folders(folder)
    disk.find(folder).sync()
    points = []
    process = disk.process()
    log = Partition(folder, "t", 0, lambda: config, fs=process, clock=FakeClock())
    for number in range(12):
        put(log, number, txn=True)
        if number % 4 == 3:
            log.end_transaction(NAMED, 0, committed=number % 8 == 3)
        points.append((disk.point(), log.log_end_offset, number))
    rng = random.Random(seed)
    for point, _, number in points:
        for survivor in point.crashes(rng, 4):
            again = Partition(folder, "t", 0, lambda: config, fs=survivor.process(), clock=FakeClock())
            found = values_of(again)
            assert found[: number + 1] == [b"7:%d" % one for one in range(number + 1)]
            (entry,) = again.producers()
            assert entry.next_sequence == len(found)
            open_from = len(found) // 4 * 4
            assert entry.transaction_offset == -1 or found[open_from - 4 : open_from] or open_from == 0
            committed = values_of(again, "read_committed")
            assert set(committed) <= {b"7:%d" % one for one in (0, 1, 2, 3, 8, 9, 10, 11)}
            put(again, entry.next_sequence)
            with pytest.raises(OutOfOrderSequence):
                put(again, entry.next_sequence + 5)


def test_a_producer_with_a_name_outlives_its_batches_and_a_power_cut() -> None:
    """Retention deletes its last batches before or after the machine dies: every open still knows its sequence."""
    config = TopicConfig.from_mapping({"fsync": "never", "file_delete_delay_ms": 0})

    def opened(disk: SimulatedDisk) -> Partition:
        return Partition("/t/0", "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())

    def check(log: Partition) -> None:
        assert [(entry.producer_id, entry.next_sequence >= 3) for entry in log.producers()] == [(NAMED, True)]

    for trims_before in (False, True):
        disk = SimulatedDisk()
        disk.make_folders("/t/0")
        disk.find("/t/0").sync()
        log = opened(disk)
        for number in range(3):
            put(log, number)
        log.roll()
        if trims_before:
            log.trim(log.log_end_offset)
        log.close()
        points = []
        disk.on_effect = lambda disk=disk, points=points: points.append(disk.point())  # type: ignore[misc]
        put(opened(disk), 3)
        disk.on_effect = None
        for point in points:
            for survivor in point.crashes(random.Random(1), 6):
                log = opened(survivor)
                check(log)
                log.append([b"another"], ack="durable")
                log.trim(log.segments()[-1].base_offset)
                log.close()
                check(opened(survivor))
                for again in survivor.point().crashes(random.Random(2), 2):
                    check(opened(again))
                    found = inspect_partition(again.process(), "/t/0", "t", 0, config, Tally())
                    assert not [str(one) for one in found.findings if one.severity == "damage"]


# ---------------------------------------------------------------- the files

RUNS = st.lists(st.builds(SequenceRun, st.integers(0, 2**31), st.integers(0, 2**63), st.integers(0, 2**31))).map(tuple)
ENTRIES = st.lists(st.builds(ProducerEntry, st.integers(0, 2**63), st.integers(0, 2**15), RUNS))


@settings(max_examples=50)
@given(ENTRIES, st.binary(max_size=30), st.integers(0, 10**6))
def test_files_come_back_or_are_refused(entries: list[ProducerEntry], noise: bytes, at: int) -> None:
    """Any cut and any flipped bit is detected."""
    data = encode_snapshot(entries)
    assert decode_snapshot(data) == entries
    aborted = [AbortedTransaction(one.producer_id, one.epoch, 2**62) for one in entries]
    assert decode_aborted(encode_aborted(7, aborted)) == (7, aborted)
    at %= len(data)
    for damaged in (noise, data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data + b"\0"):
        with pytest.raises(MalformedProducerFile):
            decode_snapshot(damaged)
        with pytest.raises(MalformedProducerFile):
            decode_aborted(damaged)


def test_the_api_is_public(tmp_path: Path) -> None:
    """Its functions have their public names."""
    assert segmentlog.ProducerStamp is ProducerStamp


# ---------------------------------------------------------------- what a close leaves behind


def _append_numbered(store: LogStore, name: str, count: int) -> None:
    with store.producer(name=name, linger_ms=0) as producer:
        for number in range(count):
            producer.send_many("t", [b"%d" % number])


def _headers_read(log: Partition) -> int:
    """Return the number of headers that were read to restore the producers."""
    with log._known_producers() as states:
        return states._unsnapshotted


def test_closing_leaves_what_was_known_of_producers(tmp_path: Path) -> None:
    """Opening a log of many small batches restores its producers and open transactions without reading the batches."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        _append_numbered(store, "a", 400)
        with store.producer(linger_ms=0) as producer:  # left open when the store is closed, and not aborted
            producer.begin_transaction()
            producer.send_many("t", [b"open"])
            expected = store.topic("t").partition(0).producers()
            store.topic("t").partition(0).close()
            path = tmp_path / "s/t/0/producers"
            assert path.exists()
    with segmentlog.open(tmp_path / "s", background=False) as store:
        log = store.topic("t").partition(0)
        assert _headers_read(log) < 10
        assert {one.producer_id: one.runs for one in log.producers()} == {one.producer_id: one.runs for one in expected}
        with store.producer(name="a", linger_ms=0) as producer:
            assert producer.last_sequence("t") == 399
            producer.send_many("t", [b"400"])


@pytest.mark.parametrize("harm", ["garbage", "older", "copied", "truncated", "rolled", "missing"])
def test_what_a_close_left_is_believed_only_of_that_log(tmp_path: Path, harm: str) -> None:
    """A snapshot of another log, of an older end or with a wrong checksum costs only time."""
    path = tmp_path / "s/t/0/producers"
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        _append_numbered(store, "a", 300)
    older = path.read_bytes()
    with segmentlog.open(tmp_path / "s", background=False) as store:
        _append_numbered(store, "b", 300)
        log = store.topic("t").partition(0)
        if harm == "truncated":
            log.truncate(350)
        elif harm == "rolled":
            log.roll()
            _append_numbered(store, "b", 3)
        expected = {(one.producer_id, one.runs) for one in log.producers()}
    if harm == "garbage":
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    elif harm in ("older", "truncated"):
        path.write_bytes(older)
    elif harm == "missing":
        path.unlink()
    elif harm == "copied":
        segment = tmp_path / "s/t/0/00000000000000000000.log"
        segment.write_bytes(segment.read_bytes())  # the same file, though: only one put in its place is another
        other = tmp_path / "other"
        other.write_bytes(segment.read_bytes())
        other.replace(segment)
    with segmentlog.open(tmp_path / "s", background=False) as store:
        assert {(one.producer_id, one.runs) for one in store.topic("t").partition(0).producers()} == expected


def test_dump_tells_what_a_close_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dump producers` says up to where it counts, and of whom."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        _append_numbered(store, "a", 300)
    from segmentlog.cli import cli
    from segmentlog.cli.common import run

    assert run(cli, ["dump", str(tmp_path / "s/t/0/producers")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("up to byte ")
    assert "last sequence 299" in out
