"""A restore to a time or to offsets: find the records to omit, and undo transactions that lose some of their records.

    1  find the requested cuts; pieces that are wholly after them are not downloaded
    2  extend the cuts so that no transaction is split
    3  truncate files at the cuts
    4  abort transactions that the cuts have left open, and move committed offsets that are after a cut to the cut

The folder becomes a store only after the last step. A restore that was killed repeats all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import msgspec

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.format.batch import TRANSACTIONAL
from segmentlog.format.control import decode_marker
from segmentlog.format.file_names import INTERNAL_TOPICS, LOG_SUFFIX, OFFSETS_TOPIC, TRANSACTIONS_TOPIC, segment_name
from segmentlog.format.manifest import ShippedPartition, ShippedTopic
from segmentlog.groups.committed_offsets import CommittedOffset, decode_key, encode_key, offset_decoder
from segmentlog.log.partition import Partition
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.restore.cut_points import (
    Cuts,
    Piece,
    RestoreTarget,
    bytes_below,
    cut_at_time,
    cut_topics,
    cuts_at_offsets,
    epoch_below,
    normalize_cuts,
)
from segmentlog.objects.restore.parallel_jobs import Job
from segmentlog.objects.restore.transaction_cuts import ConsistentCuts, extend_cuts, find_commits, find_ends
from segmentlog.records import PartitionId
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

RunJobs = Callable[[list[Job]], None]
"""Runs jobs in any order, and returns when all have ended."""
Read = Callable[[ShippedTopic, ShippedPartition, Piece], bytes]
"""Returns the shipped bytes of a piece."""


_Found = TypeVar("_Found")


class CutPartition(msgspec.Struct, frozen=True):
    """A partition that is restored without the offsets ``[offset, end_offset)``.

    ``wanted_offset`` is the requested cut; None if only a transaction required the cut.
    """

    topic: str
    partition: int
    offset: int
    end_offset: int
    wanted_offset: int | None


class _CommittedOffsetRecord(msgspec.Struct, frozen=True):
    """A committed offset (None if it was deleted), and the offset of the record that contains it."""

    record_offset: int
    committed: CommittedOffset | None


class PointInTimeRestore:
    """A restore to a time or to offsets: finds and extends the cuts, truncates files, and undoes split transactions."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        store_id: str,
        url: str,
        topics: list[ShippedTopic],
        target: RestoreTarget,
        clock: Clock,
    ) -> None:
        self._fs = fs
        self._path = path
        self._store_id = store_id
        self._url = url
        self._whole = topics
        self._target = target
        self._clock = clock
        self._now_ms = clock.now_ms()
        self._parts = {(topic.id, part.number): part for topic in topics for part in topic.partitions}
        self._requested: Cuts = {}
        self._kept = ConsistentCuts({})
        self.warnings: list[str] = []
        """Consequences of the cuts, for the operator."""

    def topics(self) -> list[ShippedTopic]:
        """Return the topics to restore, with the cuts found so far. A partition's last piece may end after its cut."""
        return cut_topics(self._whole, self._kept.cuts, self._target.reason, self._now_ms)

    @property
    def cuts(self) -> tuple[CutPartition, ...]:
        """The offsets that are not restored, by partition."""
        return tuple(
            CutPartition(topic.name, part.number, self._kept.cuts[key], part.end_offset, self._requested.get(key))
            for key, topic, part in self._all_partitions()
            if key in self._kept.cuts
        )  # fmt: skip

    def _all_partitions(self) -> Iterator[tuple[PartitionKey, ShippedTopic, ShippedPartition]]:
        for topic in self._whole:
            for part in topic.partitions:
                yield (topic.id, part.number), topic, part

    # ------------------------------------------------------------ cuts

    def check(self) -> Cuts:
        """Return the cuts at the requested offsets; an empty dictionary if the target is a time.

        Raise `ShippingRefused` for an offset that cannot be cut at.
        """
        return cuts_at_offsets(self._url, self._whole, self._target)

    def find_cuts(self, read: Read, run: RunJobs) -> None:
        """Find the requested cuts."""
        if self._target.at_ms is None:
            wanted = self.check()
        else:
            wanted = self._cuts_at_time(self._target.at_ms, read, run)
        self._requested = normalize_cuts(wanted, self._parts)
        self._kept.cuts = self._requested.copy()

    def _cuts_at_time(self, at_ms: int, read: Read, run: RunJobs) -> Cuts:
        found: Cuts = {}

        def finding(partition_key: PartitionKey, topic: ShippedTopic, part: ShippedPartition) -> Job:
            def find() -> int:
                offset = cut_at_time(part, at_ms, lambda piece: read(topic, part, piece))
                if offset is not None:
                    found[partition_key] = offset
                return 0

            return find

        run([finding(*one) for one in self._all_partitions() if one[1].name not in INTERNAL_TOPICS])
        return found

    def extend_cuts(self, read: Read, run: RunJobs) -> None:
        """Extend the cuts so that no transaction is split. All files to restore have been downloaded."""
        producing = [
            one for one in self._all_partitions() if one[2].has_producers and one[1].name != TRANSACTIONS_TOPIC
        ]
        at_ms = self._target.at_ms
        if at_ms is None and not any(partition_key in self._kept.cuts for partition_key, _, _ in producing):
            return
        deciding = [one for one in self._all_partitions() if one[1].name == TRANSACTIONS_TOPIC]
        decided = self._scan_pieces(deciding, lambda data, _: find_commits(data), read, run)
        commits = [commit for found in decided.values() for commit in found]
        if all(_is_complete(part) for _, _, part in deciding) and all(commit.is_by_id for commit in commits):
            named = {
                partition_key for commit in commits for partition_key in commit.ends
            }  # all that were ever in a transaction
            producing = [one for one in producing if one[0] in named]
        ends = self._scan_pieces(producing, find_ends, read, run)
        self._kept = extend_cuts(self._kept.cuts, ends, commits, self._never_cut(), at_ms)
        self._kept.cuts = normalize_cuts(self._kept.cuts, self._parts)

    def _scan_pieces(
        self, these: list[tuple[PartitionKey, ShippedTopic, ShippedPartition]],
        find: Callable[[bytes, int], list[_Found]], read: Read, run: RunJobs,
    ) -> dict[PartitionKey, list[_Found]]:  # fmt: skip
        """Call ``find`` with the bytes of each piece of these partitions, and with the log start offset.

        Return its results by partition, in the order of offsets.
        """
        found: dict[PartitionKey, dict[int, list[_Found]]] = {partition_key: {} for partition_key, _, _ in these}

        def scan_job(partition_key: PartitionKey, topic: ShippedTopic, part: ShippedPartition, piece: Piece) -> Job:
            def scan() -> int:
                found[partition_key][piece.base_offset] = find(read(topic, part, piece), part.log_start_offset)
                return 0

            return scan

        run(
            [
                scan_job(partition_key, topic, part, piece)
                for partition_key, topic, part in these
                for piece in part.pieces
            ]
        )
        return {partition_key: [one for base in sorted(of) for one in of[base]] for partition_key, of in found.items()}

    def _never_cut(self) -> set[PartitionKey]:
        return {partition_key for partition_key, topic, _ in self._all_partitions() if topic.name in INTERNAL_TOPICS}

    def truncate_files(self) -> None:
        """Remove the batches after the cut from the segment file that contains it."""
        for topic in self.topics():
            for part in topic.partitions:
                if (topic.id, part.number) in self._kept.cuts and (part.segments or part.chunks):
                    path = f"{self._path}/{topic.name}/{part.number}/{segment_name(part.active_base)}{LOG_SUFFIX}"
                    data = read_file(self._fs, path)
                    below = bytes_below(data, part.end_offset, path)
                    if len(below) < len(data) or below != data:
                        replace_file(self._fs, path, below)

    # ------------------------------------------------------------ undo

    def undo_transactions(self) -> None:
        """Abort open transactions and move committed offsets. Opening the logs for this also recovers them."""
        self._warn()
        left_open = {partition_key for partition_key, _ in self._kept.undecided}
        for topic in self.topics():
            for part in topic.partitions:
                partition_key = (topic.id, part.number)
                is_offsets_topic = topic.name == OFFSETS_TOPIC
                is_cut = partition_key in self._kept.cuts or is_offsets_topic
                if (is_cut and (part.has_producers or is_offsets_topic)) or partition_key in left_open:
                    self._undo_in_partition(topic, part, is_cut, is_offsets_topic)

    def _undo_in_partition(
        self, topic: ShippedTopic, part: ShippedPartition, is_cut: bool, is_offsets_topic: bool
    ) -> None:
        partition_key = (topic.id, part.number)
        config = TopicConfig.from_mapping(topic.config)
        log = Partition(
            f"{self._path}/{topic.name}/{part.number}", topic.name, part.number, lambda: config,
            topic_id=topic.id, fs=self._fs, clock=self._clock,
        )  # fmt: skip
        try:
            for entry in log.open_transactions():
                one = (partition_key, entry.producer_id)
                if one in self._kept.undecided or (is_cut and one not in self._kept.committed):
                    log.end_transaction(entry.producer_id, entry.epoch, committed=False)
            if is_offsets_topic:
                self._move_committed_offsets(log, partition_key)
            log.flush()
        except BaseException:
            log.abandon()
            raise
        log.close()

    def _move_committed_offsets(self, log: Partition, partition_key: PartitionKey) -> None:
        """Move committed offsets that are after a cut to the cut, and reset those that undone transactions set."""
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        stuck: set[str] = set()
        moved: set[str] = set()
        compacted_offset = self._parts[partition_key].compacted.begun_offset
        undone = self._kept.undone.get(partition_key, set())
        for (group, about), (valid, last) in self._committed_offsets(log, undone).items():
            if valid is None and last.record_offset < compacted_offset:
                stuck.add(group)  # the committed offset before the transaction may have been compacted away
                valid = last
            committed = None if valid is None else self._clipped(about, valid.committed)
            if committed != last.committed:
                keys.append(encode_key(group, about))
                values.append(None if committed is None else msgspec.msgpack.encode(committed))
                moved.add(group)
        if keys:
            log.append(values, keys)
        if moved:
            self.warnings.append(f"committed offsets of these groups were moved back: {_listed(moved)}")
        if stuck:
            self.warnings.append(
                "undone transactions have set committed offsets of these groups. They were not moved back, because the"
                f" earlier committed offsets were compacted away: {_listed(stuck)}"
            )

    def _committed_offsets(
        self, log: Partition, undone: Collection[int]
    ) -> Mapping[tuple[str, PartitionId], tuple[_CommittedOffsetRecord | None, _CommittedOffsetRecord]]:
        """Return (the last valid record, the last record) of each committed offset.

        A record is not valid if the marker of its transaction is in ``undone``.
        """
        valid: dict[tuple[str, PartitionId], _CommittedOffsetRecord] = {}
        last: dict[tuple[str, PartitionId], _CommittedOffsetRecord] = {}
        pending: dict[int, list[tuple[tuple[str, PartitionId], _CommittedOffsetRecord]]] = {}
        for batch in log.read(log.log_start_offset, control=True):
            producer_id = batch.header.producer_id
            if batch.header.is_control:
                marker = decode_marker(batch.header, batch.payload)
                entries = pending.pop(producer_id, []) if marker is not None and marker.committed else []
                _put_last(last, entries)
                if batch.base_offset not in undone:
                    _put_last(valid, entries)
                pending.pop(producer_id, None)
                continue
            entries = []
            for offset, key, value in zip(batch.offsets.tolist(), batch.keys, batch.values, strict=True):
                if (about := decode_key(key, self._store_id)) is not None:
                    committed = None if value is None else offset_decoder.decode(value)
                    entries.append((about, _CommittedOffsetRecord(offset, committed)))
            if batch.header.attributes & TRANSACTIONAL:
                pending.setdefault(producer_id, []).extend(entries)
            else:
                _put_last(last, entries)
                _put_last(valid, entries)
        for entries in pending.values():  # committed by a decision whose marker is not written yet
            _put_last(last, entries)
            _put_last(valid, entries)
        return {about: (valid.get(about), last) for about, last in last.items()}

    def _clipped(self, about: PartitionId, committed: CommittedOffset | None) -> CommittedOffset | None:
        offset = self._kept.cuts.get((about.topic_id, about.partition))
        if committed is None or offset is None or committed.offset <= offset:
            return committed
        epoch = epoch_below(self._parts[about.topic_id, about.partition].epochs, offset)
        return msgspec.structs.replace(committed, offset=offset, epoch=epoch)

    def _warn(self) -> None:
        compacted = {
            topic.name
            for partition_key, topic, part in self._all_partitions()
            if partition_key in self._kept.cuts and part.compacted.begun_offset > self._kept.cuts[partition_key]
        }
        if compacted:
            self.warnings.append(
                f"these topics were compacted after the restore point: {_listed(compacted)}; records of keys that were"
                " overwritten after it may be missing"
            )
        if self._kept.producers:
            self.warnings.append(
                f"committed transactions of {len(self._kept.producers):,} producers were undone, in all partitions that"
                " they wrote to"
            )


def _is_complete(part: ShippedPartition) -> bool:
    """Return whether a log contains every record that was ever written to it."""
    return not (part.log_start_offset or part.lost_ranges or part.compacted.begun_offset)


def _put_last(
    of: dict[tuple[str, PartitionId], _CommittedOffsetRecord],
    entries: list[tuple[tuple[str, PartitionId], _CommittedOffsetRecord]],
) -> None:
    for about, position in entries:
        known = of.get(about)
        if known is None or known.record_offset < position.record_offset:
            of[about] = position


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


_SHOWN = 10
