"""Lines to a topic, a chunk of them at a time, as fast as they come."""

from __future__ import annotations

import logging
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast

import msgspec

from segmentlog.errors import OutOfOrderSequence, SegmentlogError
from segmentlog.exchange.record_files import FieldNames, TransferError, records_of
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import media_types
from segmentlog.http.rest.batch_append import Records
from segmentlog.http.rest.native.native_models import Appended, AppendQuery, Broken, Range
from segmentlog.http.rest.request_bodies import Disconnected
from segmentlog.http.rest.responses import Reply, json_reply
from segmentlog.http.rest.rest_error_codes import no_partition
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call
    from segmentlog.producing.producer import Producer

logger = logging.getLogger("segmentlog.http")

_CHUNK_BYTES: Final = 1 << 20
_LINE_MAX: Final = 64 << 20


async def append(call: Call) -> Reply:
    """Each chunk of lines becomes visible at once. What was appended is told, also when the rest is not."""
    name = check_topic_name(call.path["topic"])
    call.check_topic(Operation.WRITE, name)
    query: AppendQuery = call.query
    if query.producer is not None:
        call.check(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, query.producer)
    sink = await call.work(_open, call, name, query)
    try:
        async for piece in call.body.pieces():
            call.check_topic(Operation.WRITE, name)  # a body may go on for hours
            if sink.add(piece):
                await call.append(sink.flush)
            await call.body.keep(sink.kept_bytes)
        await call.append(sink.finish)
    except Disconnected:
        logger.info("lines to %s broke off after %d records", name, sink.appended.records)
        raise
    except (SegmentlogError, OSError) as error:
        problem = call.site.problem_of(error)
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("lines to %s", name, exc_info=error)
        broken = Broken(problem.error_code, problem.message, sink.appended, sink.next_line)
        return json_reply(broken, problem.status)
    finally:
        await call.append(sink.close)
    return json_reply(sink.appended)


def _open(call: Call, topic: str, query: AppendQuery) -> Lines:
    if query.producer is None:
        count = call.store.topic(topic).partition_count
        if query.partition is not None and query.partition >= count:
            raise no_partition(topic, query.partition)
        return Lines(call, topic, query)
    return NumberedLines(call, topic, query)


class Lines:
    """Lines on their way. What is appended is told by `appended`."""

    def __init__(self, call: Call, topic: str, query: AppendQuery) -> None:
        self.appended = Appended(0, [])
        self._call = call
        self._topic = topic
        self._query = query
        self._skips_empty = call.content_type == media_types.NDJSON
        self._rest = bytearray()
        self._searched = 0
        """No line ends in so many bytes at the begin of `_rest`."""
        self.next_line = 1
        """Of the body: all lines before it are appended, or were before."""

    @property
    def kept_bytes(self) -> int:
        """Of the body: the lines that are not appended yet."""
        return len(self._rest)

    def add(self, piece: bytes) -> bool:
        """Take a piece of the body; whether there is enough for a chunk: then `flush`."""
        self._rest += piece
        return len(self._rest) >= _CHUNK_BYTES

    def flush(self) -> None:
        """Append the lines that are whole, a chunk at a time. Raises what that raises; nothing of it was appended."""
        rest, at = self._rest, 0
        try:
            while len(rest) - at >= _CHUNK_BYTES:
                # Each byte of a long line is looked at once, however many pieces it comes in.
                end = -1 if self._searched >= _CHUNK_BYTES else rest.rfind(b"\n", at, at + _CHUNK_BYTES)
                if end < 0:
                    end = rest.find(b"\n", at + max(self._searched, _CHUNK_BYTES))
                if end < 0:
                    self._searched = len(rest) - at
                    if len(rest) - at > _LINE_MAX:
                        raise HttpProblem(
                            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                            f"line {self.next_line} has more than {_LINE_MAX} bytes",
                        )
                    return
                block, at, self._searched = bytes(memoryview(rest)[at:end]), end + 1, 0
                self._append(block.split(b"\n"))
        finally:
            del rest[:at]

    def finish(self) -> None:
        """Append what is left: the last line need not end."""
        self.flush()
        block = bytes(self._rest)
        self._rest.clear()
        if block:
            self._append(block.removesuffix(b"\n").split(b"\n"))

    def close(self) -> None:
        """It is done, or broken off."""

    def _append(self, found: list[bytes]) -> None:
        records = self._records(found, self.next_line)
        if records.values:
            self._send(records)
        self.next_line += len(found)  # only now: a chunk that fails in a partition is sent again whole

    def _records(self, found: list[bytes], first: int) -> Records:
        if self._query.form == "records":
            return _parsed(found, first)
        values: list[bytes | None] = [*filter(None, found)] if self._skips_empty and b"" in found else [*found]
        return Records(values)

    def _send(self, records: Records) -> None:
        query = self._query
        placed = self._call.rest.appending.append(self._topic, records, query.ack, query.partition)
        for partition, base_offset, rows in placed.parts:
            self._tell(partition, base_offset, placed.count if rows is None else len(rows))
        for _, error, _ in placed.errors:
            raise error

    def _tell(self, partition: int, base_offset: int, count: int) -> None:
        self.appended.records += count
        ranges = self.appended.ranges
        for last in reversed(ranges):
            if last.partition == partition:
                if last.base_offset + last.records == base_offset:
                    last.records += count
                    return
                break
        ranges.append(Range(partition, base_offset, count))


def _parsed(found: list[bytes], first: int) -> Records:
    """Lines that are records, as `segmentlog import` reads them."""
    documents = []
    for number, line in enumerate(found, first):
        if line.strip():
            try:
                document = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _unprocessable(f"line {number} is no JSON: {error}") from None
            if not isinstance(document, dict):
                raise _unprocessable(f"line {number} is no JSON object")
            documents.append(document)
    if not documents:
        return Records([])
    try:
        (rows,) = records_of(iter(documents), FieldNames(), max(len(documents), 1), first, sys.maxsize)
    except TransferError as error:
        raise _unprocessable(str(error)) from None
    headers = None if rows.headers is None else [tuple(pairs) for pairs in rows.headers]
    return Records(rows.values, rows.keys, rows.partitions, rows.timestamps, headers)


def _unprocessable(message: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, message)


class NumberedLines(Lines):
    """The same by a named producer, to one partition: what it has appended before is left out."""

    def __init__(self, call: Call, topic: str, query: AppendQuery) -> None:
        super().__init__(call, topic, query)
        self._partition = query.partition or 0
        log = call.store.topic(topic).partition(self._partition)
        self._log_name = f"{topic}/{log.number}"
        self._producer: Producer = call.store.producer(name=query.producer, ack=query.ack)
        try:
            self._next = self._producer.last_sequence(topic, self._partition) + 1
            self._left_out = self._next - query.sequence
            if self._left_out < 0:
                raise OutOfOrderSequence(self._log_name, -1, self._next, query.sequence)
        except BaseException:
            self._producer.close()
            raise
        self.appended.skipped, self.appended.next_sequence = 0, self._next

    def close(self) -> None:
        """The name is free for the next request."""
        self._producer.close()

    def _send(self, records: Records) -> None:
        skipped = min(self._left_out, len(records.values))
        self._left_out -= skipped
        assert isinstance(self.appended.skipped, int)
        self.appended.skipped += skipped
        values = records.values[skipped:]
        if not values:
            return
        stamps = cast("list[int] | None", records.timestamps)  # `_parsed` gives every record one, or none
        deliveries = self._producer.send_many(
            self._topic, values,
            keys=None if records.keys is None else records.keys[skipped:],
            timestamps=None if stamps is None else stamps[skipped:],
            headers=None if records.headers is None else list(records.headers[skipped:]),
            partition=self._partition,
        )  # fmt: skip
        self._next += len(values)
        self.appended.next_sequence = self._next
        for partition, base_offset, count in deliveries.places():
            self._tell(partition, base_offset, count)
