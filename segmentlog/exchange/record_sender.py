"""Send parsed records to a topic, and count them, so that every error message can contain how to resume."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from segmentlog.errors import InputMismatch, InvalidRecord, ProducerFenced, RecordTooLarge

if TYPE_CHECKING:
    from segmentlog.exchange.resumed_input import ResumedInput
    from segmentlog.policy.partitioner import Rows
    from segmentlog.producing.delivery import Deliveries
    from segmentlog.producing.producer import Producer

_Item = TypeVar("_Item")


class OutgoingRecords:
    """Records to send, as columns of equal length. Missing columns are None."""

    __slots__ = ("headers", "keys", "partition", "timestamps", "values")

    def __init__(self, values: list[bytes | None], keys: list[bytes | None] | None = None) -> None:
        self.values = values
        self.keys = keys
        self.headers: list[Any] | None = None
        self.timestamps: list[int] | None = None
        self.partition: int | None = None

    def part(self, begin: int, end: int) -> OutgoingRecords:
        """Return records ``[begin, end)``."""
        return self._of_each(itemgetter(slice(begin, end)))

    def rows(self, rows: Rows) -> OutgoingRecords:
        """Return the records at these indexes, which must ascend."""
        if len(rows) == len(self.values):
            return self
        numbers = rows.tolist()
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return self.part(numbers[0], numbers[-1] + 1)
        return self._of_each(lambda column: list(map(column.__getitem__, numbers)))

    def _of_each(self, take: Callable[[list[Any]], list[Any]]) -> OutgoingRecords:
        part = OutgoingRecords(take(self.values), None if self.keys is None else take(self.keys))
        part.headers = None if self.headers is None else take(self.headers)
        part.timestamps = None if self.timestamps is None else take(self.timestamps)
        part.partition = self.partition
        return part


def _header_bytes(pairs: Sequence[tuple[str, bytes | None]] | None) -> int:
    """Return an upper limit for the bytes of headers."""
    return sum(4 * len(name) + len(blob or b"") for name, blob in pairs or ())


class BadRecord(ValueError):
    """A record cannot be parsed or sent. ``index`` is its index in the list of records, from 0."""

    def __init__(self, index: int, why: str, *, has_no_key: bool = False) -> None:
        super().__init__(why)
        self.index = index
        self.has_no_key = has_no_key


Parse = Callable[[list[bytes]], Iterator[OutgoingRecords]]


class RecordSender:
    """Sends lists of records, counts them, and reports their offsets to a callback."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        partition: int | None,
        pairs: tuple[tuple[str, bytes], ...],
        on_append: Callable[[int, int, int], None] | None,
        limit_bytes: int | None,
        skipped: int = 0,
    ) -> None:
        """Send to ``topic``.

        on_append    called with partition, base offset and count of each append
        limit_bytes  size limit of a record; needed only if the records of a list may belong to several partitions
        skipped      number of input records before the first record that is sent
        """
        self._producer = producer
        self._topic = topic
        self._partition = partition
        self._pairs = list(pairs)
        self._on_append = on_append
        self._limit_bytes = limit_bytes
        self._started = time.perf_counter()
        self.records = self.bytes = 0
        self.number = self.first = skipped
        """Index in the input of the next record (``number``) and of the current list's first (``first``).
        """
        self._appended_later: dict[int, int] = {}
        """By partition: number of records after ``number`` that are appended although the record ``number`` is not.
        """

    def send(self, lists: OutgoingRecords) -> None:
        """Append a list of records. If a record is too large, append the records before it, then raise.

        So the user can resume with --skip and the number of appended records. A record that may be too large is sent
        alone. If it were sent together with later records, other partitions would append the later records, and the
        resumed run would append them a second time.
        """
        begin = 0
        for large in self._large(lists):
            self._send_part(lists.part(begin, large))
            self._send_part(lists.part(large, large + 1))
            begin = large + 1
        self._send_part(lists.part(begin, len(lists.values)) if begin else lists)

    def _is_spread(self, lists: OutgoingRecords) -> bool:
        """Return whether the records of a list may belong to several partitions."""
        return lists.keys is not None and lists.partition is None

    def _large(self, lists: OutgoingRecords) -> list[int]:
        """Return the indexes of records that may exceed the size limit; none if all records have the same partition."""
        if self._limit_bytes is None or not self._is_spread(lists):
            return []
        limit_bytes = self._limit_bytes * 9 // 10 - _header_bytes(self._pairs)
        keys = lists.keys or [None] * len(lists.values)
        header_bytes = [0] if lists.headers is None else list(map(_header_bytes, lists.headers))
        if max(map(len, filter(None, lists.values)), default=0) + max(map(len, filter(None, keys)), default=0) < (
            limit_bytes - max(header_bytes)
        ):
            return []
        sizes = (len(value or b"") + len(key or b"") for value, key in zip(lists.values, keys, strict=True))
        return [index for index, size in enumerate(map(add, sizes, cycle(header_bytes))) if size >= limit_bytes]

    def _send_part(self, lists: OutgoingRecords) -> None:
        if not lists.values:
            return
        begin = self.number
        try:
            self._send_list(lists)
        except RecordTooLarge as error:
            if self._appended_later:
                # The limit was lowered during this call. Records before the large one may be missing.
                raise
            # The limit may have been lowered during this call. Then some partitions have appended their records, all of
            # which are before the first missing record. Send the records before the large one. If one of them is too
            # large as well, this call raises its error instead.
            self._send_part(lists.part(self.number - begin, error.index))
            raise ValueError(
                f"record {self.number + 1} takes {error.size_bytes} bytes, over max.message.bytes ="
                f" {error.limit_bytes}: raise the limit with 'segmentlog alter', or"
                f" {self._how_to_skip(self.number + 1)}"
            ) from None
        except InvalidRecord as error:
            raise BadRecord(begin - self.first + error.index, error.reason, has_no_key=error.has_no_key) from None

    def describe_failure(self, error: ValueError, empty_lines: int) -> str:
        """Return a message about the next record, which is too long, with the ways to continue."""
        line = f" (line {self.number + 1 + empty_lines})" if empty_lines else ""
        return (
            f"record {self.number + 1}{line} {error}: raise the limit with 'segmentlog alter', or"
            f" {self._how_to_skip(self.number + 1)}"
        )

    def _how_to_skip(self, number: int) -> str:
        return f"skip the record with --skip {number}"

    def _send_list(self, lists: OutgoingRecords) -> None:
        if lists.values:
            deliveries = self._append(lists, lists.partition if self._partition is None else self._partition)
            self.number += len(lists.values)  # before the callback, which may fail although the records are appended
            self._report(deliveries)

    def _append(self, lists: OutgoingRecords, partition: int | None) -> Deliveries:
        headers = lists.headers
        if self._pairs:
            given = headers or [[]] * len(lists.values)
            headers = [[*own, *self._pairs] for own in given]
        deliveries, error = self._producer.try_send_many(
            self._topic, lists.values, lists.keys, headers=headers, timestamps=lists.timestamps, partition=partition
        )
        if error is not None:
            self._count_partial(deliveries)
            raise error
        self.records += len(lists.values)
        return deliveries

    def _count_partial(self, deliveries: Deliveries) -> None:
        """Count the appended records of a list that failed in some partitions, and find its first missing record."""
        first_missing, partitions = deliveries.first_missing, deliveries.chunk.assigned_partitions
        appended = {partition: count for partition, _, count in deliveries.places()}
        self.records += sum(appended.values())
        self.number += first_missing
        if partitions is not None and appended:
            after = Counter(partitions[first_missing:].tolist())
            self._appended_later = {number: after[number] for number in sorted(appended) if after[number]}
        self._report(deliveries)

    def _report(self, deliveries: Deliveries) -> None:
        if self._on_append is not None:
            for place in deliveries.places():
                self._on_append(*place)

    def finish(self) -> None:
        """Check after the last record that the input is complete, if the producer is named."""

    @property
    def has_appended(self) -> bool:
        """Whether this or an earlier run has appended a record of the input."""
        return bool(self.records)

    def summary(self) -> str:
        """Return counts, time and rate in one line."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = self.records / seconds
        return f"{self.records:,} records, {self.bytes:,} bytes in {seconds:.2f} s ({rate:,.0f} records/s)"

    def how_to_resume(self, error: Exception) -> str:
        """Describe how to append the remaining records after a failure.

        Empty if the user can run the same command again, or if no command helps.
        """
        if not self.records:
            return ""
        appended = "record was" if self.number == 1 else f"{self.number} records were"
        advice = f"the first {appended} appended; resume with --skip {self.number}" if self.number else ""
        if not self._appended_later:
            return advice
        count, *others = sum(self._appended_later.values()), *map(str, self._appended_later)
        return (
            f"{advice}{'. ' * bool(advice)}{count} later record{'s were' if count > 1 else ' was'} also appended, in"
            f" partition{'s' * (len(others) > 1)} {', '.join(others)}; resuming appends {'them' if count > 1 else 'it'}"
            " a second time"
        )


class ResumingSender(RecordSender):
    """Sends the records of an input that earlier runs of the same named producer have not appended."""

    def __init__(self, resumption: ResumedInput, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._resumption = resumption
        self._sent_before = 0

    def _is_spread(self, lists: OutgoingRecords) -> bool:
        return lists.partition is None and self._partition is None

    def _how_to_skip(self, number: int) -> str:
        return "remove the record from the input"

    def _send_list(self, lists: OutgoingRecords) -> None:
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
            self._resumption.mark_sent(share)
            self._report(deliveries)
        self._resumption.advance()
        self._sent_before += len(lists.values) - sum(len(share.rows) for share in shares)
        self.number += len(lists.values)

    def finish(self) -> None:
        self._resumption.check_complete(self._partition)

    @property
    def has_appended(self) -> bool:
        return bool(self.records or self._sent_before)

    def summary(self) -> str:
        earlier = f"; earlier runs had appended {self._sent_before:,}" if self._sent_before else ""
        return super().summary() + earlier

    def how_to_resume(self, error: Exception) -> str:
        if isinstance(error, ProducerFenced | InputMismatch):
            return ""
        return "run the command again with the same input to resume"
