"""Sending what `produce` has read: lists of records, counted, so that every failure says where to go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from segmentlog.errors import InvalidRecord, OtherInput, ProducerFenced, RecordTooLarge

if TYPE_CHECKING:
    from segmentlog.exchange.resumed_input import Resumption
    from segmentlog.policy.partitioner import Rows
    from segmentlog.producing.delivery import Deliveries
    from segmentlog.producing.producer import Producer

_Item = TypeVar("_Item")


class Lists:
    """Records on their way: lists of one length, or None for a column that no record has."""

    __slots__ = ("headers", "keys", "partition", "timestamps", "values")

    def __init__(self, values: list[bytes | None], keys: list[bytes | None] | None = None) -> None:
        self.values = values
        self.keys = keys
        self.headers: list[Any] | None = None
        self.timestamps: list[int] | None = None
        self.partition: int | None = None

    def part(self, begin: int, end: int) -> Lists:
        """Records ``[begin, end)``."""
        return self._of_each(itemgetter(slice(begin, end)))

    def rows(self, rows: Rows) -> Lists:
        """The records of these rows, which ascend."""
        if len(rows) == len(self.values):
            return self
        numbers = rows.tolist()
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return self.part(numbers[0], numbers[-1] + 1)
        return self._of_each(lambda column: list(map(column.__getitem__, numbers)))

    def _of_each(self, take: Callable[[list[Any]], list[Any]]) -> Lists:
        part = Lists(take(self.values), None if self.keys is None else take(self.keys))
        part.headers = None if self.headers is None else take(self.headers)
        part.timestamps = None if self.timestamps is None else take(self.timestamps)
        part.partition = self.partition
        return part


def _header_bytes(pairs: Sequence[tuple[str, bytes | None]] | None) -> int:
    """How many bytes headers take, at the most."""
    return sum(4 * len(name) + len(blob or b"") for name, blob in pairs or ())


class BadRecord(ValueError):
    """A record that cannot be understood or sent; ``index`` counts from 0 in its list."""

    def __init__(self, index: int, why: str, *, has_no_key: bool = False) -> None:
        super().__init__(why)
        self.index = index
        self.has_no_key = has_no_key


Parse = Callable[[list[bytes]], Iterator[Lists]]


class Sender:
    """Sends lists, counts them, and tells where they went."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        partition: int | None,
        pairs: tuple[tuple[str, bytes], ...],
        tell: Callable[[int, int, int], None] | None,
        limit_bytes: int | None,
        skipped: int = 0,
    ) -> None:
        """``tell`` is called with partition, base offset and count of what was appended.

        ``limit_bytes``: of one record, where the records of a list may go to several partitions.
        """
        self._producer = producer
        self._topic = topic
        self._partition = partition
        self._pairs = list(pairs)
        self._tell = tell
        self._limit_bytes = limit_bytes
        self._started = time.perf_counter()
        self.records = self.bytes = 0
        self.number = self.first = skipped
        """Of the next record of the input, and of the first one of the list in hand; those left out count."""
        self._beyond: dict[int, int] = {}
        """By partition: records after ``number`` that are appended, though others of the same list are not."""

    def send(self, lists: Lists) -> None:
        """Append a list; when a record is too large, what comes before it, so that the count of records is true.

        Partitions are appended to one after another. A record that may be too large goes alone,
        lest those after it that belong to other partitions arrive, and again with --skip.
        """
        begin = 0
        for large in self._large(lists):
            self._send_part(lists.part(begin, large))
            self._send_part(lists.part(large, large + 1))
            begin = large + 1
        self._send_part(lists.part(begin, len(lists.values)) if begin else lists)

    def _is_spread(self, lists: Lists) -> bool:
        """Whether the records of a list may go to several partitions."""
        return lists.keys is not None and lists.partition is None

    def _large(self, lists: Lists) -> list[int]:
        """Which records may be over the limit, if they may go to several partitions at once."""
        if self._limit_bytes is None or not self._is_spread(lists):
            return []
        limit_bytes = self._limit_bytes * 9 // 10 - _header_bytes(self._pairs)
        keys = lists.keys or [None] * len(lists.values)
        of_headers = [0] if lists.headers is None else list(map(_header_bytes, lists.headers))
        if max(map(len, filter(None, lists.values)), default=0) + max(map(len, filter(None, keys)), default=0) < (
            limit_bytes - max(of_headers)
        ):
            return []
        sizes = (len(value or b"") + len(key or b"") for value, key in zip(lists.values, keys, strict=True))
        return [index for index, size in enumerate(map(add, sizes, cycle(of_headers))) if size >= limit_bytes]

    def _send_part(self, lists: Lists) -> None:
        if not lists.values:
            return
        begin = self.number
        try:
            self._send_list(lists)
        except RecordTooLarge as error:
            if self._beyond:  # the limit has fallen just now: what comes before it is not known to be missing
                raise
            # The limit may have fallen just now. Then some partitions have their records of the list: all of them
            # before the first missing record. One of the others before this record may be too large as well: that
            # one is raised.
            self._send_part(lists.part(self.number - begin, error.index))
            raise ValueError(
                f"record {self.number + 1} takes {error.size_bytes} bytes, over max.message.bytes ="
                f" {error.limit_bytes}: raise it with 'segmentlog alter', or {self._how_to_leave_out(self.number + 1)}"
            ) from None
        except InvalidRecord as error:
            raise BadRecord(begin - self.first + error.index, error.reason, has_no_key=error.has_no_key) from None

    def told(self, error: ValueError, empty_lines: int) -> str:
        """That the next record is too long, and what to do."""
        line = f" (line {self.number + 1 + empty_lines})" if empty_lines else ""
        return (
            f"record {self.number + 1}{line} {error}: raise it with 'segmentlog alter', or"
            f" {self._how_to_leave_out(self.number + 1)}"
        )

    def _how_to_leave_out(self, number: int) -> str:
        return f"leave the record out with --skip {number}"

    def _send_list(self, lists: Lists) -> None:
        if lists.values:
            deliveries = self._append(lists, lists.partition if self._partition is None else self._partition)
            self.number += len(lists.values)  # before it is told: who is told may fail, and they are there
            self._tell_of(deliveries)

    def _append(self, lists: Lists, partition: int | None) -> Deliveries:
        headers = lists.headers
        if self._pairs:
            given = headers or [[]] * len(lists.values)
            headers = [[*own, *self._pairs] for own in given]
        deliveries, error = self._producer.try_send_many(
            self._topic, lists.values, lists.keys, headers=headers, timestamps=lists.timestamps, partition=partition
        )
        if error is not None:
            self._note_partial(deliveries)
            raise error
        self.records += len(lists.values)
        return deliveries

    def _note_partial(self, deliveries: Deliveries) -> None:
        """A list failed in some partitions. Count what the others have, and where the first missing record is."""
        first_missing, partitions = deliveries.first_missing, deliveries.chunk.given_places
        appended = {partition: count for partition, _, count in deliveries.places()}
        self.records += sum(appended.values())
        self.number += first_missing
        if partitions is not None and appended:
            after = Counter(partitions[first_missing:].tolist())
            self._beyond = {number: after[number] for number in sorted(appended) if after[number]}
        self._tell_of(deliveries)

    def _tell_of(self, deliveries: Deliveries) -> None:
        if self._tell is not None:
            for place in deliveries.places():
                self._tell(*place)

    def finish(self) -> None:
        """The input is at its end."""

    @property
    def has_appended(self) -> bool:
        """Whether a record of the input is in the topic."""
        return bool(self.records)

    def summary(self) -> str:
        """What was done."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = self.records / seconds
        return f"{self.records:,} records, {self.bytes:,} bytes in {seconds:.2f} s ({rate:,.0f} records/s)"

    def how_to_go_on(self, error: Exception) -> str:
        """How to append the rest after a failure; empty where the same command does that, or nothing does."""
        if not self.records:
            return ""
        appended = "record is" if self.number == 1 else f"{self.number} records are"
        advice = f"the first {appended} appended; go on with --skip {self.number}" if self.number else ""
        if not self._beyond:
            return advice
        count, *others = sum(self._beyond.values()), *map(str, self._beyond)
        return (
            f"{advice}{'. ' * bool(advice)}{count} later record{'s are' if count > 1 else ' is'} appended, too, in"
            f" partition{'s' * (len(others) > 1)} {', '.join(others)}: going on appends {'them' if count > 1 else 'it'}"
            " a second time"
        )


class NamedSender(Sender):
    """Sends what an earlier run of the same job has not sent."""

    def __init__(self, resumption: Resumption, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._resumption = resumption
        self._there = 0

    def _is_spread(self, lists: Lists) -> bool:
        return lists.partition is None and self._partition is None

    def _how_to_leave_out(self, number: int) -> str:
        return "take the record out of the input"

    def _send_list(self, lists: Lists) -> None:
        if not lists.values:
            return
        partition = lists.partition if self._partition is None else self._partition
        shares = self._resumption.shares(lists.values, lists.keys, partition)
        for share in shares:
            try:
                deliveries = self._append(lists.rows(share.rows), share.partition)
            except (RecordTooLarge, InvalidRecord) as error:
                error.index = int(share.rows[error.index])
                raise
            self._resumption.note_sent(share)
            self._tell_of(deliveries)
        self._resumption.advance()
        self._there += len(lists.values) - sum(len(share.rows) for share in shares)
        self.number += len(lists.values)

    def finish(self) -> None:
        self._resumption.check_complete(self._partition)

    @property
    def has_appended(self) -> bool:
        return bool(self.records or self._there)

    def summary(self) -> str:
        there = f"; {self._there:,} were there already" if self._there else ""
        return super().summary() + there

    def how_to_go_on(self, error: Exception) -> str:
        if isinstance(error, ProducerFenced | OtherInput):
            return ""
        return "run it again with the same input: it goes on where it stopped"
