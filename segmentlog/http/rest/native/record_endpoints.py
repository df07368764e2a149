"""Records of one partition from an offset on: as a document, or as lines for as many as there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import CorruptBatch
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.rest import media_types
from segmentlog.http.rest.large_batch_slot import Alone
from segmentlog.http.rest.native.native_models import ReadQuery
from segmentlog.http.rest.record_json import bare_values, lines, list_of, parts
from segmentlog.http.rest.responses import Flow, Reply
from segmentlog.http.rest.rest_error_codes import no_partition
from segmentlog.security.principals import Operation

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call
    from segmentlog.log.partition import Partition

_PAGE_RECORDS: Final = 500
_PAGE_RECORDS_MAX: Final = 10_000
_PAGE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 4 << 20
_SEND_BYTES: Final = 1 << 20
_TURN_BYTES: Final = 8 << 20
"""What is rendered before it is sent. The rest of a batch is decompressed once more."""


def _log(call: Call) -> Partition:
    topic = call.store.topic(check_topic_name(call.path["topic"]))
    number = call.path["partition"]
    if number >= topic.partition_count:
        raise no_partition(topic.name, number)
    return topic.partition(number)


def _start(log: Partition, query: ReadQuery) -> int:
    if query.offset == "earliest":
        return log.log_start_offset
    if query.offset == "latest":
        return log.end_offset(isolation=query.isolation, durable_only=query.durable_only)
    return int(query.offset)


@contextmanager
def _up_to_fault(found: list[bytes]) -> Iterator[None]:
    """Within: damage or an unreadable batch ends an answer that has something. The request that begins at it raises."""
    try:
        yield
    except CorruptBatch:
        if not found:
            raise


async def read(call: Call) -> Reply | Flow:
    """A page, or lines."""
    call.check_topic(Operation.READ, call.path["topic"])
    if call.media == media_types.NDJSON:
        return Flow(_lines(call), media_types.NDJSON)
    return Reply(await call.work(_page, call))


def _page(call: Call) -> bytes:
    query: ReadQuery = call.query
    log = _log(call)
    start = _start(log, query)
    left = min(query.max or _PAGE_RECORDS, _PAGE_RECORDS_MAX)
    end = log.end_offset(isolation=query.isolation, durable_only=query.durable_only)
    found: list[bytes] = []
    next_offset, size = max(start, 0), 0
    with Alone() as alone, _up_to_fault(found):
        for batch in log.read(start, _PAGE_BYTES, isolation=query.isolation, durable_only=query.durable_only):
            alone.see(batch)
            for part in parts(batch):
                taken = part.slice(0, left)
                found.append(lines(taken, query.values))
                left -= len(taken)
                size += taken.raw_size_bytes * len(taken) // max(taken.header.record_count, 1)
                next_offset = taken.next_offset
                if not left or size >= _PAGE_BYTES:
                    break
            if not left or size >= _PAGE_BYTES:
                break
        else:
            next_offset = max(next_offset, start) if found else max(start, end)
    return b'{"records":%b,"next_offset":%d,"log_start_offset":%d,"end_offset":%d}' % (
        list_of(found), next_offset, log.log_start_offset, max(end, next_offset),
    )  # fmt: skip


# ------------------------------------------------------------ lines


async def _lines(call: Call) -> AsyncIterator[bytes]:
    pieces = await call.work(_pieces, call)
    coming = asyncio.ensure_future(call.work(next, pieces, None))
    gone = asyncio.ensure_future(call.body.gone())
    try:
        while (piece := await coming) is not None and not (gone.done() or call.site.is_closing):
            coming = asyncio.ensure_future(call.work(next, pieces, None))  # while this one is sent
            yield piece
    finally:
        gone.cancel()
        if not coming.done():
            await asyncio.wait([coming])


def _pieces(call: Call) -> Iterator[bytes]:
    """Raises at once what is wrong with the offset."""
    query: ReadQuery = call.query
    log = _log(call)
    start = _start(log, query)
    log.check_position(start)
    return _gathered(_render(log, start, query))


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Fewer and larger ones: each costs a change of threads, and a write."""
    found: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size >= _SEND_BYTES:
                yield b"".join(found)
                found, size = [], 0
    except CorruptBatch:
        if found:
            yield b"".join(found)
        raise
    if found:
        yield b"".join(found)


def _render(log: Partition, start: int, query: ReadQuery) -> Iterator[bytes]:
    """Up to where the log ended when it began, so that it comes to an end while others append."""
    end = log.end_offset(isolation=query.isolation, durable_only=query.durable_only)
    left: Any = query.max or float("inf")
    at = start
    while at < end and left > 0:
        found, reached, left = _turn(log, at, end, left, query)
        yield from found
        if reached == at:
            return
        at = reached


def _turn(log: Partition, at: int, end: int, left: Any, query: ReadQuery) -> tuple[list[bytes], int, Any]:
    """Some pieces, where they end, and how many records are left: no batch is kept while a client takes them."""
    found: list[bytes] = []
    size = 0
    with Alone() as alone, _up_to_fault(found):
        for batch in log.read(at, _READ_BYTES, isolation=query.isolation, durable_only=query.durable_only):
            if batch.base_offset >= end:
                return found, end, left
            alone.see(batch)
            for part in parts(batch, end):
                taken = part if len(part) <= left else part.slice(0, int(left))
                found.append(bare_values(taken) if query.form == "values" else lines(taken, query.values))
                size += len(found[-1])
                left -= len(taken)
                at = taken.next_offset
                if left <= 0 or size >= _TURN_BYTES:
                    return found, at, left
            at = batch.next_offset
    return found, at, left
