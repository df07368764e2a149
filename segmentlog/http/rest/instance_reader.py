"""What a consumer instance reads with: a member of a group, or partitions that its client chose itself."""

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
_COMMIT_EVERY_S: Final = 5.0
_MATCH_EVERY_S: Final = 1.0
_SETTLE_S: Final = 2.0
_POLL_INTERVAL_MS: Final = 420_000
"""Longer than an instance lives without being asked: it is the instance that ends, and not its membership."""

Reset = Literal["earliest", "latest", "error"]
MayRead = Callable[[str], bool]


class ReaderOptions(msgspec.Struct, frozen=True):
    """How an instance reads."""

    reset: Reset = "latest"
    auto_commit: bool = True
    isolation: Isolation = "read_uncommitted"


class GroupReader:
    """Reads for one instance; one thread at a time."""

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
        """Where the client is: behind what was handed out by requests before this one."""
        self._commit_due_s = time.monotonic() + _COMMIT_EVERY_S

    @property
    def is_member(self) -> bool:
        """Whether it has subscribed, and the group says which partitions it reads."""
        return self._pattern is not None or bool(self._topics)

    # ------------------------------------------------------------ what is read

    def subscribe(self, topics: list[str], pattern: str | None, may_read: MayRead) -> None:
        """Become a member that reads these topics, or those that match, instead of what it read before."""
        if self._chosen:
            raise illegal("it has partitions assigned, and cannot subscribe: delete the subscription first")
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
        self._match_due_s = time.monotonic() + _MATCH_EVERY_S
        self._join({})

    def unsubscribe(self) -> None:
        """Read nothing any more."""
        self._leave()
        self._pattern, self._topics, self._chosen = None, [], []

    def subscription(self) -> list[str]:
        """The topics it subscribes to."""
        return self._topics

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these, outside of what the group's members share. Raises `UnknownTopic`."""
        if self.is_member:
            raise illegal("it has subscribed, and cannot be assigned partitions: delete the subscription first")
        chosen = sorted(set(partitions))
        for tp in chosen:
            if tp.partition >= self._store.topic(check_topic_name(tp.topic)).partition_count:
                raise rest_error_codes.no_partition(tp.topic, tp.partition)
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
                raise InvalidConfig("auto.offset.reset", "none", f"'earliest' or 'latest': the group knows no {tp}")
            else:
                consumer.seek(tp.topic, tp.partition, reset)
        self._delivered = consumer.positions()

    def assignment(self) -> list[TopicPartition]:
        """What it reads now."""
        return list(self._chosen) if self._consumer is None or self._chosen else self._member_assignment(0.0)

    def _member_assignment(self, wait_s: float) -> list[TopicPartition]:
        assert self._consumer is not None
        return self._consumer.poll_group(wait_s)

    # ------------------------------------------------------------ membership

    def _matching(self, pattern: TopicPattern, may_read: MayRead) -> list[str]:
        return [topic for topic in pattern.matching(self._store.topics()) if may_read(topic)]

    def _join(self, carried: Mapping[TopicPartition, int]) -> None:
        """Become a member. Where it is further than what the group knows, it goes on there."""
        if not self._topics:
            return
        options = self._options
        left = dict(carried)

        def begin(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                offset = left.pop(tp, -1)
                if offset > consumer.position(tp.topic, tp.partition):
                    consumer.seek(tp.topic, tp.partition, offset)
                self._delivered[tp] = consumer.position(tp.topic, tp.partition)

        def end(partitions: list[TopicPartition]) -> None:
            if self._options.auto_commit:
                self._commit_quietly({tp: self._delivered[tp] for tp in partitions if tp in self._delivered})
            for tp in partitions:
                self._delivered.pop(tp, None)

        def lose(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                self._delivered.pop(tp, None)

        consumer = self._consumer = self._store.consumer(
            *self._topics, group=self.group, start="latest" if options.reset == "latest" else "earliest",
            auto_offset_reset=options.reset, isolation=options.isolation, client_id=self._name,
            max_poll_interval_ms=_POLL_INTERVAL_MS, on_assigned=begin, on_revoked=end, on_lost=lose,
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
        """Topics and rights come and go: subscribe to those that match now."""
        if self._pattern is None:
            return
        if time.monotonic() < self._match_due_s and all(map(may_read, self._topics)):
            return
        self._match_due_s = time.monotonic() + _MATCH_EVERY_S
        topics = self._matching(self._pattern, may_read)
        if topics != self._topics:
            carried = self._positions()
            self._leave()
            self._topics = topics
            self._join(carried)

    def close(self) -> None:
        """Commit if that is automatic, and leave."""
        self.unsubscribe()

    # ------------------------------------------------------------ reading

    def records(self, max_bytes: int, may_read: MayRead) -> list[Record]:
        """What there is now, up to about ``max_bytes`` of keys and values, at least one record. Waits for nothing.

        What cannot be read ends it: what was read before is handed out, and whoever asks next is told. Raises
        `Forbidden` where a topic may not be read any more.
        """
        self._follow_pattern(may_read)
        for topic in {tp.topic for tp in self._chosen} or self._topics:
            if not may_read(topic):
                raise Forbidden(f"topic {topic!r} may not be read any more", error_code=rest_error_codes.FORBIDDEN)
        consumer = self._consumer
        if consumer is None:
            return []
        if self._options.auto_commit and time.monotonic() >= self._commit_due_s:
            self._commit_due_s = time.monotonic() + _COMMIT_EVERY_S
            self._commit_quietly(self._delivered)
        found: list[Record] = []
        size = 0
        consumer.wakeup()  # partitions that others have yet to let go of are not waited for
        handed_out = iter(consumer)
        try:
            for record in handed_out:
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
            # Positions are behind what was read: dropped here, it would be committed and never handed out.
            logger.warning("consumer %s of group %s: stopped reading: %s", self._name, self.group, error)
        except BaseException:
            self.give_back(found)
            raise
        finally:
            handed_out.close()  # type: ignore[attr-defined]
        return found

    def give_back(self, records: Iterable[Record]) -> None:
        """Records that were read and are not handed out after all: they are read again."""
        if self._consumer is None:
            return
        first: dict[TopicPartition, int] = {}
        for record in records:
            first.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        for tp, offset in first.items():
            if tp in self._positions():
                self._consumer.seek(tp.topic, tp.partition, offset)

    def delivered(self) -> None:
        """What was read so far is the client's now."""
        self._delivered = self._positions()

    def has_more(self) -> bool:
        """Whether there may be something to read. Cheap, and from any thread while nobody reads."""
        return self._consumer is not None and any(self._consumer.lag().values())

    def _positions(self) -> dict[TopicPartition, int]:
        return {} if self._consumer is None else self._consumer.positions()

    # ------------------------------------------------------------ positions

    def seek(self, tp: TopicPartition, to: int | Literal["earliest", "latest"], *, from_time: bool = False) -> None:
        """Go on there; ``from_time``: at the first record of that time. Raises `HttpProblem` for what is not read."""
        consumer = self._settled(tp)
        if from_time:
            found = self._store.open_partition(tp.topic, tp.partition).offset_for_timestamp(int(to))
            to = "latest" if found is None else found
        self._delivered[tp] = consumer.seek(tp.topic, tp.partition, to)

    def _settled(self, tp: TopicPartition) -> Consumer:
        """With the partition assigned; a member that has not asked for records yet is given its partitions first."""
        if self._consumer is None:
            raise illegal("it reads nothing: subscribe, or assign partitions first")
        if tp not in self._positions() and self.is_member:
            self._member_assignment(_SETTLE_S)
        if tp not in self._positions():
            raise illegal(f"{tp} is not assigned to it")
        return self._consumer

    def commit(self, positions: Mapping[TopicPartition, tuple[int, str]] | None, *, sync: bool = True) -> None:
        """Commit positions with their texts; None: behind everything that was handed out."""
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
                self._settled(tp)
            self._consumer.commit(positions, metadata=text, sync=sync)
        else:
            self._store.groups.reset(self.group, positions, metadata=text, sync=sync)

    def _commit_quietly(self, positions: Mapping[TopicPartition, int]) -> None:
        """For what nobody asked for: what is not committed is read again by others."""
        moved = {tp: offset for tp, offset in positions.items() if self._known(tp) != offset}
        try:
            if moved and self.is_member and self._consumer is not None:
                self._consumer.commit(moved, sync=False)
            elif moved:
                self._store.groups.reset(self.group, moved, sync=False)
        except (ConsumerFenced, SegmentlogError) as error:
            logger.warning("consumer %s of group %s: not committed: %s", self._name, self.group, error)

    def _known(self, tp: TopicPartition) -> int:
        found = self._store.group_offsets.committed(self.group).get(tp)
        return -1 if found is None else found.offset

    def committed(self, partitions: Iterable[TopicPartition]) -> list[tuple[TopicPartition, int, str]]:
        """What the group has committed of these."""
        known = self._store.group_offsets.committed(self.group)
        return [(tp, known[tp].offset, known[tp].metadata) for tp in partitions if tp in known]


def illegal(why: str) -> HttpProblem:
    """What the state of the instance does not allow."""
    return HttpProblem(HTTPStatus.CONFLICT, f"Illegal state: {why}", error_code=rest_error_codes.ILLEGAL_STATE)
