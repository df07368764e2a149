"""Appends lines to a topic as they arrive, a chunk at a time."""

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
from segmentlog.http.rest.batch_append import RecordLists
from segmentlog.http.rest.native.native_models import AppendedRange, AppendQuery, AppendResult, PartialAppend
from segmentlog.http.rest.request_bodies import ClientDisconnected
from segmentlog.http.rest.responses import RestResponse, json_response
from segmentlog.http.rest.rest_error_codes import unknown_partition
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest
    from segmentlog.producing.producer import Producer

logger = logging.getLogger("segmentlog.http")

_CHUNK_BYTES: Final = 1 << 20
_LINE_MAX: Final = 64 << 20


async def append(request: RestRequest) -> RestResponse:
    """Append the lines of the body. Readers get each chunk at once. An error response reports what was appended."""
    name = check_topic_name(request.path["topic"])
    request.check_topic(Operation.WRITE, name)
    query: AppendQuery = request.query
    if query.producer is not None:
        request.check(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, query.producer)
    appender = await request.work(_open, request, name, query)
    try:
        async for piece in request.body.pieces():
            request.check_topic(Operation.WRITE, name)  # a body may take hours: check the rights again
            if appender.add(piece):
                await request.append(appender.flush)
            await request.body.reserve(appender.buffered_bytes)
        await request.append(appender.finish)
    except ClientDisconnected:
        logger.info(
            "client disconnected while appending lines to topic %s, after %d records", name, appender.appended.records
        )
        raise
    except (SegmentlogError, OSError) as error:
        problem = request.context.problem_of(error)
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("cannot append lines to topic %s", name, exc_info=error)
        broken = PartialAppend(problem.error_code, problem.message, appender.appended, appender.next_line)
        return json_response(broken, problem.status)
    finally:
        await request.append(appender.close)
    return json_response(appender.appended)


def _open(request: RestRequest, topic: str, query: AppendQuery) -> LineAppender:
    if query.producer is None:
        count = request.store.topic(topic).partition_count
        if query.partition is not None and query.partition >= count:
            raise unknown_partition(topic, query.partition)
        return LineAppender(request, topic, query)
    return NumberedLineAppender(request, topic, query)


class LineAppender:
    """Appends lines as they arrive. `appended` holds the result."""

    def __init__(self, request: RestRequest, topic: str, query: AppendQuery) -> None:
        self.appended = AppendResult(0, [])
        self._call = request
        self._topic = topic
        self._query = query
        self._skips_empty = request.content_type == media_types.NDJSON
        self._buffer = bytearray()
        self._searched_bytes = 0
        """Bytes at the start of `_buffer` that contain no line end."""
        self.next_line = 1
        """Number of the first line that is not appended, from 1."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the body that are not appended yet."""
        return len(self._buffer)

    def add(self, piece: bytes) -> bool:
        """Add a piece of the body. Return whether `flush` should be called."""
        self._buffer += piece
        return len(self._buffer) >= _CHUNK_BYTES

    def flush(self) -> None:
        """Append complete lines, a chunk at a time. If it raises, the failing chunk was not appended."""
        rest, at = self._buffer, 0
        try:
            while len(rest) - at >= _CHUNK_BYTES:
                # Scan each byte of a long line once, however many pieces it arrives in.
                end = -1 if self._searched_bytes >= _CHUNK_BYTES else rest.rfind(b"\n", at, at + _CHUNK_BYTES)
                if end < 0:
                    end = rest.find(b"\n", at + max(self._searched_bytes, _CHUNK_BYTES))
                if end < 0:
                    self._searched_bytes = len(rest) - at
                    if len(rest) - at > _LINE_MAX:
                        raise HttpProblem(
                            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                            f"line {self.next_line} has more than {_LINE_MAX:,} bytes",
                        )
                    return
                block, at, self._searched_bytes = bytes(memoryview(rest)[at:end]), end + 1, 0
                self._append(block.split(b"\n"))
        finally:
            del rest[:at]

    def finish(self) -> None:
        """Append the remaining lines. The last line needs no line end."""
        self.flush()
        block = bytes(self._buffer)
        self._buffer.clear()
        if block:
            self._append(block.removesuffix(b"\n").split(b"\n"))

    def close(self) -> None:
        """Release the producer, if there is one."""

    def _append(self, found: list[bytes]) -> None:
        records = self._records(found, self.next_line)
        if records.values:
            self._send(records)
        self.next_line += len(found)  # after all partitions: if one fails, the client must send the whole chunk again

    def _records(self, found: list[bytes], first: int) -> RecordLists:
        if self._query.form == "records":
            return _parsed(found, first)
        values: list[bytes | None] = [*filter(None, found)] if self._skips_empty and b"" in found else [*found]
        return RecordLists(values)

    def _send(self, records: RecordLists) -> None:
        query = self._query
        result = self._call.rest.appender.append(self._topic, records, query.ack, query.partition)
        for partition, base_offset, rows in result.parts:
            self._add_range(partition, base_offset, result.count if rows is None else len(rows))
        for _, error, _ in result.errors:
            raise error

    def _add_range(self, partition: int, base_offset: int, count: int) -> None:
        self.appended.records += count
        ranges = self.appended.ranges
        for last in reversed(ranges):
            if last.partition == partition:
                if last.base_offset + last.records == base_offset:
                    last.records += count
                    return
                break
        ranges.append(AppendedRange(partition, base_offset, count))


def _parsed(found: list[bytes], first: int) -> RecordLists:
    """Decode lines that are records, as `segmentlog import` does."""
    documents = []
    for number, line in enumerate(found, first):
        if line.strip():
            try:
                document = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _unprocessable(f"line {number} is not JSON: {error}") from None
            if not isinstance(document, dict):
                raise _unprocessable(f"line {number} is not a JSON object")
            documents.append(document)
    if not documents:
        return RecordLists([])
    try:
        (rows,) = records_of(iter(documents), FieldNames(), max(len(documents), 1), first, sys.maxsize)
    except TransferError as error:
        raise _unprocessable(str(error)) from None
    headers = None if rows.headers is None else [tuple(pairs) for pairs in rows.headers]
    return RecordLists(rows.values, rows.keys, rows.partitions, rows.timestamps, headers)


def _unprocessable(message: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, message)


class NumberedLineAppender(LineAppender):
    """Appends lines of a named producer to one partition, and skips those appended by earlier requests."""

    def __init__(self, request: RestRequest, topic: str, query: AppendQuery) -> None:
        super().__init__(request, topic, query)
        self._partition = query.partition or 0
        log = request.store.topic(topic).partition(self._partition)
        self._log_name = f"{topic}/{log.number}"
        self._producer: Producer = request.store.producer(name=query.producer, ack=query.ack)
        try:
            self._next = self._producer.last_sequence(topic, self._partition) + 1
            self._skip_count = self._next - query.sequence
            if self._skip_count < 0:
                raise OutOfOrderSequence(self._log_name, -1, self._next, query.sequence)
        except BaseException:
            self._producer.close()
            raise
        self.appended.skipped, self.appended.next_sequence = 0, self._next

    def close(self) -> None:
        """Close the producer so that the next request can use its name."""
        self._producer.close()

    def _send(self, records: RecordLists) -> None:
        skipped = min(self._skip_count, len(records.values))
        self._skip_count -= skipped
        assert isinstance(self.appended.skipped, int)
        self.appended.skipped += skipped
        values = records.values[skipped:]
        if not values:
            return
        stamps = cast("list[int] | None", records.timestamps)  # `_parsed` sets all timestamps or none
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
            self._add_range(partition, base_offset, count)
