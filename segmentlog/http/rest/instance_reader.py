"""Reads records for a consumer instance, as a member of a group or from assigned partitions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from segmentlog.errors import ConsumerFenced, InvalidConfig, SegmentlogError
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.error_responses import Forbidden, HttpProblem
from segmentlog.http.rest import rest_error_codes
from segmentlog.policy.topic_pattern import BadPattern, TopicPattern
from segmentlog.records import Record, TopicPartition

if TYPE_CHECKING:
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.log.partition import Isolation
    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog.http")

RECORDS_MAX: Final = 100_000
_COMMIT_INTERVAL_S: Final = 5.0
_MATCH_INTERVAL_S: Final = 1.0
_ASSIGN_WAIT_S: Final = 2.0
_POLL_INTERVAL_MS: Final = 420_000
"""Time-out of group members. It is longer than that of an idle instance, so the instance expires first."""

Reset = Literal["earliest", "latest", "error"]
MayRead = Callable[[str], bool]


class ReaderOptions(msgspec.Struct, frozen=True):
    """Options of an instance's reader."""

    reset: Reset = "latest"
    auto_commit: bool = True
    isolation: Isolation = "read_uncommitted"


class InstanceReader:
    """Reads for one instance. Not thread-safe."""

    def __init__(self, store: LogStore, group: str, name: str, options: ReaderOptions) -> None:
        self._store = store
        self.group = group
        self._name = name
        self._options = options
        self._consumer: Consumer | None = None
        self._topics: list[str] = []
        self._pattern: TopicPattern | None = None
        self._match_due_s = 0.0
        self._chosen: list[TopicPartition] = []
        self._delivered: dict[TopicPartition, int] = {}
        """Positions after the records that previous requests have returned."""
        self._commit_due_s = time.monotonic() + _COMMIT_INTERVAL_S

    @property
    def is_member(self) -> bool:
        """Whether the reader has subscribed, so that the group assigns its partitions."""
        return self._pattern is not None or bool(self._topics)

    # ------------------------------------------------------------ what is read

    def subscribe(self, topics: list[str], pattern: str | None, may_read: MayRead) -> None:
        """Subscribe to these topics, or to those that match a pattern, instead of the previous ones."""
        if self._chosen:
            raise illegal_state(
                "the consumer has assigned partitions and cannot subscribe; DELETE its subscription first"
            )
        compiled = None
        if pattern is not None:
            try:
                compiled = TopicPattern(pattern)
            except BadPattern as error:
                raise HttpProblem(
                    HTTPStatus.UNPROCESSABLE_ENTITY,
                    f"topic_pattern: {error}",
                    error_code=rest_error_codes.INVALID_PAYLOAD,
                ) from None
            topics = self._matching(compiled, may_read)
        for topic in topics:
            self._store.topic(check_topic_name(topic))
        self._leave()
        self._pattern, self._topics = compiled, topics
        self._match_due_s = time.monotonic() + _MATCH_INTERVAL_S
        self._join({})

    def unsubscribe(self) -> None:
        """Remove the subscription or the assignment."""
        self._leave()
        self._pattern, self._topics, self._chosen = None, [], []

    def subscription(self) -> list[str]:
        """Return the topics of the subscription."""
        return self._topics

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions without group membership. Raises `UnknownTopic`."""
        if self.is_member:
            raise illegal_state(
                "the consumer has subscribed and cannot assign partitions; delete the subscription first"
            )
        chosen = sorted(set(partitions))
        for tp in chosen:
            if tp.partition >= self._store.topic(check_topic_name(tp.topic)).partition_count:
                raise rest_error_codes.unknown_partition(tp.topic, tp.partition)
        before = self._positions()
        self._leave()
        self._chosen = chosen
        if not chosen:
            return
        options = self._options
        reset = options.reset
        self._consumer = consumer = self._store.consumer(
            *chosen, start="earliest", auto_offset_reset=reset, isolation=options.isolation
        )
        committed = self._store.group_offsets.committed(self.group)
        for tp in chosen:
            if tp in before:
                consumer.seek(tp.topic, tp.partition, before[tp])
            elif tp in committed:
                consumer.seek(tp.topic, tp.partition, committed[tp].offset)
            elif reset == "error":
                self._leave()
                raise InvalidConfig(
                    "auto.offset.reset", "none", f"'earliest' or 'latest': the group has no committed offset for {tp}"
                )
            else:
                consumer.seek(tp.topic, tp.partition, reset)
        self._delivered = consumer.positions()

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that the reader reads now."""
        return list(self._chosen) if self._consumer is None or self._chosen else self._member_assignment(0.0)

    def _member_assignment(self, wait_s: float) -> list[TopicPartition]:
        assert self._consumer is not None
        return self._consumer.poll_group(wait_s)

    # ------------------------------------------------------------ membership

    def _matching(self, pattern: TopicPattern, may_read: MayRead) -> list[str]:
        return [topic for topic in pattern.matching(self._store.topics()) if may_read(topic)]

    def _join(self, former_positions: Mapping[TopicPartition, int]) -> None:
        """Join the group. Keep positions that are after the committed offsets."""
        if not self._topics:
            return
        options = self._options
        left = dict(former_positions)

        def start_partitions(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                offset = left.pop(tp, -1)
                if offset > consumer.position(tp.topic, tp.partition):
                    consumer.seek(tp.topic, tp.partition, offset)
                self._delivered[tp] = consumer.position(tp.topic, tp.partition)

        def commit_partitions(partitions: list[TopicPartition]) -> None:
            if self._options.auto_commit:
                self._commit_quietly({tp: self._delivered[tp] for tp in partitions if tp in self._delivered})
            for tp in partitions:
                self._delivered.pop(tp, None)

        def drop_partitions(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                self._delivered.pop(tp, None)

        consumer = self._consumer = self._store.consumer(
            *self._topics, group=self.group, start="latest" if options.reset == "latest" else "earliest",
            auto_offset_reset=options.reset, isolation=options.isolation, client_id=self._name,
            max_poll_interval_ms=_POLL_INTERVAL_MS, on_assigned=start_partitions,
            on_revoked=commit_partitions, on_lost=drop_partitions,
        )  # fmt: skip

    def _leave(self) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        try:
            if self._options.auto_commit:
                self._commit_quietly(self._delivered)
        finally:
            self._consumer, self._delivered = None, {}
            consumer.close()

    def _follow_pattern(self, may_read: MayRead) -> None:
        """Subscribe again if the matching topics or the access rights have changed."""
        if self._pattern is None:
            return
        if time.monotonic() < self._match_due_s and all(map(may_read, self._topics)):
            return
        self._match_due_s = time.monotonic() + _MATCH_INTERVAL_S
        topics = self._matching(self._pattern, may_read)
        if topics != self._topics:
            former_positions = self._positions()
            self._leave()
            self._topics = topics
            self._join(former_positions)

    def close(self) -> None:
        """Commit if auto-commit is on, and leave the group."""
        self.unsubscribe()

    # ------------------------------------------------------------ reading

    def read_records(self, max_bytes: int, may_read: MayRead) -> list[Record]:
        """Return available records, up to about ``max_bytes`` of keys and values, and at least one. Never waits.

        An error ends the batch: records before it are returned, and the next call raises it. Raises `Forbidden` if a
        topic may no longer be read.
        """
        self._follow_pattern(may_read)
        for topic in {tp.topic for tp in self._chosen} or self._topics:
            if not may_read(topic):
                raise Forbidden(
                    f"the access rules no longer allow reading topic {topic!r}", error_code=rest_error_codes.FORBIDDEN
                )
        consumer = self._consumer
        if consumer is None:
            return []
        if self._options.auto_commit and time.monotonic() >= self._commit_due_s:
            self._commit_due_s = time.monotonic() + _COMMIT_INTERVAL_S
            self._commit_quietly(self._delivered)
        found: list[Record] = []
        size = 0
        consumer.wakeup()  # do not wait until other members release partitions
        iterator = iter(consumer)
        try:
            for record in iterator:
                size += len(record.key or b"") + len(record.value or b"")
                if found and size > max_bytes:
                    consumer.seek(record.topic, record.partition, record.offset)
                    break
                found.append(record)
                if size >= max_bytes or len(found) >= RECORDS_MAX:
                    break
        except (SegmentlogError, OSError) as error:
            if not found:
                raise
            # The positions are already after these records. Return the records, or their offsets are committed unread.
            logger.warning("consumer instance %s of group %s: reading stopped: %s", self._name, self.group, error)
        except BaseException:
            self.return_records(found)
            raise
        finally:
            iterator.close()  # type: ignore[attr-defined]
        return found

    def return_records(self, records: Iterable[Record]) -> None:
        """Rewind to the first of these records: they were not sent to the client."""
        if self._consumer is None:
            return
        first: dict[TopicPartition, int] = {}
        for record in records:
            first.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        for tp, offset in first.items():
            if tp in self._positions():
                self._consumer.seek(tp.topic, tp.partition, offset)

    def mark_delivered(self) -> None:
        """Count all records read so far as delivered to the client."""
        self._delivered = self._positions()

    def has_more(self) -> bool:
        """Return whether there may be records to read. Cheap; any thread may call it while no thread reads."""
        return self._consumer is not None and any(self._consumer.lag().values())

    def _positions(self) -> dict[TopicPartition, int]:
        return {} if self._consumer is None else self._consumer.positions()

    # ------------------------------------------------------------ positions

    def seek(self, tp: TopicPartition, to: int | Literal["earliest", "latest"], *, from_time: bool = False) -> None:
        """Seek to an offset, or with ``from_time`` to the first record from a time on. Raises `HttpProblem` (409)."""
        consumer = self._assigned_consumer(tp)
        if from_time:
            found = self._store.open_partition(tp.topic, tp.partition).offset_for_timestamp(int(to))
            to = "latest" if found is None else found
        self._delivered[tp] = consumer.seek(tp.topic, tp.partition, to)

    def _assigned_consumer(self, tp: TopicPartition) -> Consumer:
        """Return the consumer once the partition is assigned. A new member waits for its assignment."""
        if self._consumer is None:
            raise illegal_state("the consumer has no partitions: subscribe or assign partitions first")
        if tp not in self._positions() and self.is_member:
            self._member_assignment(_ASSIGN_WAIT_S)
        if tp not in self._positions():
            raise illegal_state(f"partition {tp} is not assigned to the consumer")
        return self._consumer

    def commit(self, positions: Mapping[TopicPartition, tuple[int, str]] | None, *, sync: bool = True) -> None:
        """Commit offsets with their metadata; None commits all delivered records."""
        if positions is None:
            self._commit(self._positions(), "", sync)
            return
        by_text: dict[str, dict[TopicPartition, int]] = {}
        for tp, (offset, text) in positions.items():
            by_text.setdefault(text, {})[tp] = offset
        for text, of_text in by_text.items():
            self._commit(of_text, text, sync)

    def _commit(self, positions: Mapping[TopicPartition, int], text: str, sync: bool) -> None:
        if not positions:
            return
        if self.is_member and self._consumer is not None:
            for tp in positions:
                self._assigned_consumer(tp)
            self._consumer.commit(positions, metadata=text, sync=sync)
        else:
            self._store.groups.reset(self.group, positions, metadata=text, sync=sync)

    def _commit_quietly(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit automatically. A failure is logged: other members read the records again."""
        moved = {tp: offset for tp, offset in positions.items() if self._committed_offset(tp) != offset}
        try:
            if moved and self.is_member and self._consumer is not None:
                self._consumer.commit(moved, sync=False)
            elif moved:
                self._store.groups.reset(self.group, moved, sync=False)
        except (ConsumerFenced, SegmentlogError) as error:
            logger.warning("consumer instance %s of group %s: auto-commit failed: %s", self._name, self.group, error)

    def _committed_offset(self, tp: TopicPartition) -> int:
        found = self._store.group_offsets.committed(self.group).get(tp)
        return -1 if found is None else found.offset

    def committed(self, partitions: Iterable[TopicPartition]) -> list[tuple[TopicPartition, int, str]]:
        """Return the committed offsets of these partitions."""
        known = self._store.group_offsets.committed(self.group)
        return [(tp, known[tp].offset, known[tp].metadata) for tp in partitions if tp in known]


def illegal_state(why: str) -> HttpProblem:
    """Return the response (409) for a call that the state of the instance does not allow."""
    return HttpProblem(HTTPStatus.CONFLICT, f"Illegal state: {why}", error_code=rest_error_codes.ILLEGAL_STATE)
