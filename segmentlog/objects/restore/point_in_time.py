"""A restore to a time or to offsets: what it cuts, what it takes back with that, and what it tells.

    1  the cuts that are asked for: what lies wholly behind them is not brought
    2  transactions are kept together: other partitions are cut where that takes it
    3  files are cut to the byte
    4  transactions that are open now are aborted, positions behind a cut are put at it

The folder is no store before all of it is done: killed anywhere, it is done again.
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
from segmentlog.groups.committed_offsets import CommittedOffset, decode_key, encode_key
from segmentlog.log.partition import Partition
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.restore.cut_points import (
    Cuts,
    Piece,
    Target,
    bytes_below,
    cut_at_time,
    cut_topics,
    cuts_at_offsets,
    epoch_below,
    settled,
)
from segmentlog.objects.restore.parallel_jobs import Job
from segmentlog.objects.restore.transaction_cuts import Kept, commits_in, ends_in, keep_together
from segmentlog.records import PartitionId
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

Carry = Callable[[list[Job]], None]
"""Has jobs done, in whatever order."""
Read = Callable[[ShippedTopic, ShippedPartition, Piece], bytes]
"""A piece as it was shipped."""


_Found = TypeVar("_Found")


class CutPartition(msgspec.Struct, frozen=True):
    """A partition of which ``[offset, end_offset)`` is left out; ``wanted_offset``: as it was asked for, if it was."""

    topic: str
    partition: int
    offset: int
    end_offset: int
    wanted_offset: int | None


class _Position(msgspec.Struct, frozen=True):
    """What a record says of a group's position, and the offset of the record; None: deleted."""

    record_offset: int
    committed: CommittedOffset | None


class Rewinding:
    """What one restore leaves out."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        store_id: str,
        url: str,
        topics: list[ShippedTopic],
        target: Target,
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
        self._wanted: Cuts = {}
        self._kept = Kept({})
        self.warnings: list[str] = []
        """What a person should know."""

    def topics(self) -> list[ShippedTopic]:
        """What is to be there, as far as it is known by now; the last piece of a partition may reach beyond."""
        return cut_topics(self._whole, self._kept.cuts, self._target.reason, self._now_ms)

    @property
    def cuts(self) -> tuple[CutPartition, ...]:
        """What is left out."""
        return tuple(
            CutPartition(
                topic.name, part.number, self._kept.cuts[where], part.end_offset, self._wanted.get(where)
            )
            for where, topic, part in self._everything()
            if where in self._kept.cuts
        )  # fmt: skip

    def _everything(self) -> Iterator[tuple[Where, ShippedTopic, ShippedPartition]]:
        for topic in self._whole:
            for part in topic.partitions:
                yield (topic.id, part.number), topic, part

    # ------------------------------------------------------------ what is cut

    def check(self) -> Cuts:
        """The cuts at the offsets that are asked for. Raises `ShippingRefused`."""
        return cuts_at_offsets(self._url, self._whole, self._target)

    def find(self, read: Read, carry: Carry) -> None:
        """The cuts that are asked for."""
        if self._target.at_ms is None:
            wanted = self.check()
        else:
            wanted = self._cuts_at_time(self._target.at_ms, read, carry)
        self._wanted = settled(wanted, self._parts)
        self._kept.cuts = dict(self._wanted)

    def _cuts_at_time(self, at_ms: int, read: Read, carry: Carry) -> Cuts:
        found: Cuts = {}

        def finding(where: Where, topic: ShippedTopic, part: ShippedPartition) -> Job:
            def find() -> int:
                offset = cut_at_time(part, at_ms, lambda piece: read(topic, part, piece))
                if offset is not None:
                    found[where] = offset
                return 0

            return find

        carry([finding(*one) for one in self._everything() if one[1].name not in INTERNAL_TOPICS])
        return found

    def keep_together(self, read: Read, carry: Carry) -> None:
        """Cut whatever else is to be cut, so that no transaction is torn. All that is to be there is."""
        producing = [one for one in self._everything() if one[2].has_producers and one[1].name != TRANSACTIONS_TOPIC]
        at_ms = self._target.at_ms
        if at_ms is None and not any(where in self._kept.cuts for where, _, _ in producing):
            return
        deciding = [one for one in self._everything() if one[1].name == TRANSACTIONS_TOPIC]
        decided = self._look_through(deciding, lambda data, _: commits_in(data), read, carry)
        commits = [commit for found in decided.values() for commit in found]
        if all(_is_complete(part) for _, _, part in deciding) and all(commit.is_by_id for commit in commits):
            named = {where for commit in commits for where in commit.ends}  # all that ever were transactions of
            producing = [one for one in producing if one[0] in named]
        ends = self._look_through(producing, ends_in, read, carry)
        self._kept = keep_together(self._kept.cuts, ends, commits, self._never_cut(), at_ms)
        self._kept.cuts = settled(self._kept.cuts, self._parts)

    def _look_through(
        self, these: list[tuple[Where, ShippedTopic, ShippedPartition]], find: Callable[[bytes, int], list[_Found]],
        read: Read, carry: Carry,
    ) -> dict[Where, list[_Found]]:  # fmt: skip
        """What ``find`` finds in the bytes of a piece, from the log start on; of each partition in order."""
        found: dict[Where, dict[int, list[_Found]]] = {where: {} for where, _, _ in these}

        def looking(where: Where, topic: ShippedTopic, part: ShippedPartition, piece: Piece) -> Job:
            def look() -> int:
                found[where][piece.base_offset] = find(read(topic, part, piece), part.log_start_offset)
                return 0

            return look

        carry([looking(where, topic, part, piece) for where, topic, part in these for piece in part.pieces])
        return {where: [one for base in sorted(of) for one in of[base]] for where, of in found.items()}

    def _never_cut(self) -> set[Where]:
        return {where for where, topic, _ in self._everything() if topic.name in INTERNAL_TOPICS}

    def cut_files(self) -> None:
        """Leave nothing behind the cut in the segment that it lies in."""
        for topic in self.topics():
            for part in topic.partitions:
                if (topic.id, part.number) in self._kept.cuts and (part.segments or part.chunks):
                    path = f"{self._path}/{topic.name}/{part.number}/{segment_name(part.active_base)}{LOG_SUFFIX}"
                    data = read_file(self._fs, path)
                    below = bytes_below(data, part.end_offset, path)
                    if len(below) < len(data) or below != data:
                        replace_file(self._fs, path, below)

    # ------------------------------------------------------------ what is taken back

    def take_back(self) -> None:
        """Abort what is open, and move positions. Each log is there, and recovered by that."""
        self._warn()
        left_open = {where for where, _ in self._kept.undecided}
        for topic in self.topics():
            for part in topic.partitions:
                where = (topic.id, part.number)
                is_positions = topic.name == OFFSETS_TOPIC
                is_cut = where in self._kept.cuts or is_positions
                if (is_cut and (part.has_producers or is_positions)) or where in left_open:
                    self._in_partition(topic, part, is_cut, is_positions)

    def _in_partition(self, topic: ShippedTopic, part: ShippedPartition, is_cut: bool, is_positions: bool) -> None:
        where = (topic.id, part.number)
        config = TopicConfig.from_mapping(topic.config)
        log = Partition(
            f"{self._path}/{topic.name}/{part.number}", topic.name, part.number, lambda: config,
            topic_id=topic.id, fs=self._fs, clock=self._clock,
        )  # fmt: skip
        try:
            for entry in log.open_transactions():
                one = (where, entry.producer_id)
                if one in self._kept.undecided or (is_cut and one not in self._kept.committed):
                    log.end_transaction(entry.producer_id, entry.epoch, committed=False)
            if is_positions:
                self._move_positions(log, where)
            log.flush()
        except BaseException:
            log.abandon()
            raise
        log.close()

    def _move_positions(self, log: Partition, where: Where) -> None:
        """Those that were committed by what is taken back go back themselves; those behind a cut are put at it."""
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        stuck: set[str] = set()
        moved: set[str] = set()
        compacted_offset = self._parts[where].compacted.begun_offset
        for (group, about), said in self._positions(log, self._kept.undone.get(where, set())).items():
            now, last = said
            if now is None and last.record_offset < compacted_offset:
                stuck.add(group)  # what it was before may have been compacted away
                now = last
            wanted = None if now is None else self._clipped(about, now.committed)
            if wanted != last.committed:
                keys.append(encode_key(group, about))
                values.append(None if wanted is None else msgspec.msgpack.encode(wanted))
                moved.add(group)
        if keys:
            log.append(values, keys)
        if moved:
            self.warnings.append(f"positions of groups were moved back: {_listed(moved)}")
        if stuck:
            self.warnings.append(
                "positions that were committed by transactions that are taken back stay where they are, for nobody"
                f" knows what they were before, of groups: {_listed(stuck)}"
            )

    def _positions(
        self, log: Partition, undone: Collection[int]
    ) -> Mapping[tuple[str, PartitionId], tuple[_Position | None, _Position]]:
        """(what counts, what is said last) of each position: the latter with markers that do not count any more."""
        counting: dict[tuple[str, PartitionId], _Position] = {}
        said: dict[tuple[str, PartitionId], _Position] = {}
        pending: dict[int, list[tuple[tuple[str, PartitionId], _Position]]] = {}
        for batch in log.read(log.log_start_offset, control=True):
            producer_id = batch.header.producer_id
            if batch.header.is_control:
                marker = decode_marker(batch.header, batch.payload)
                entries = pending.pop(producer_id, []) if marker is not None and marker.committed else []
                _put_last(said, entries)
                if batch.base_offset not in undone:
                    _put_last(counting, entries)
                pending.pop(producer_id, None)
                continue
            entries = []
            for offset, key, value in zip(batch.offsets.tolist(), batch.keys, batch.values, strict=True):
                if (about := decode_key(key, self._store_id)) is not None:
                    committed = None if value is None else msgspec.msgpack.decode(value, type=CommittedOffset)
                    entries.append((about, _Position(offset, committed)))
            if batch.header.attributes & TRANSACTIONAL:
                pending.setdefault(producer_id, []).extend(entries)
            else:
                _put_last(said, entries)
                _put_last(counting, entries)
        for entries in pending.values():  # decided, and the marker is still to come
            _put_last(said, entries)
            _put_last(counting, entries)
        return {about: (counting.get(about), last) for about, last in said.items()}

    def _clipped(self, about: PartitionId, committed: CommittedOffset | None) -> CommittedOffset | None:
        offset = self._kept.cuts.get((about.topic_id, about.partition))
        if committed is None or offset is None or committed.offset <= offset:
            return committed
        epoch = epoch_below(self._parts[about.topic_id, about.partition].epochs, offset)
        return msgspec.structs.replace(committed, offset=offset, epoch=epoch)

    def _warn(self) -> None:
        compacted = {
            topic.name
            for where, topic, part in self._everything()
            if where in self._kept.cuts and part.compacted.begun_offset > self._kept.cuts[where]
        }
        if compacted:
            self.warnings.append(
                f"compacted beyond the cut: {_listed(compacted)}: of a key that was written again behind it, what it"
                " was before may be missing"
            )
        if self._kept.producers:
            self.warnings.append(
                f"transactions of {len(self._kept.producers):,} producers that were committed are taken back, in all"
                " partitions that they wrote to"
            )


def _is_complete(part: ShippedPartition) -> bool:
    """Whether a log has every record that was ever written to it."""
    return not (part.log_start_offset or part.lost_ranges or part.compacted.begun_offset)


def _put_last(
    of: dict[tuple[str, PartitionId], _Position], entries: list[tuple[tuple[str, PartitionId], _Position]]
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
