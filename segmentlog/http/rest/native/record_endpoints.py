"""Returns records of one partition from an offset on: a page, or all of them as lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import CorruptBatch
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.rest import media_types
from segmentlog.http.rest.large_batch_slot import LargeBatchSlot
from segmentlog.http.rest.native.native_models import ReadQuery
from segmentlog.http.rest.record_json import bare_values, lines, list_of, parts
from segmentlog.http.rest.responses import RestResponse, StreamedResponse
from segmentlog.http.rest.rest_error_codes import unknown_partition
from segmentlog.security.principals import Operation

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest
    from segmentlog.log.partition import Partition

_PAGE_RECORDS: Final = 500
_PAGE_RECORDS_MAX: Final = 10_000
_PAGE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 4 << 20
_SEND_BYTES: Final = 1 << 20
_RENDER_BYTES: Final = 8 << 20
"""Bytes to render before sending. The rest of a batch is decompressed again later."""


def _log(request: RestRequest) -> Partition:
    topic = request.store.topic(check_topic_name(request.path["topic"]))
    number = request.path["partition"]
    if number >= topic.partition_count:
        raise unknown_partition(topic.name, number)
    return topic.partition(number)


def _start(log: Partition, query: ReadQuery) -> int:
    if query.offset == "earliest":
        return log.log_start_offset
    if query.offset == "latest":
        return log.end_offset(isolation=query.isolation, durable_only=query.durable_only)
    return int(query.offset)


@contextmanager
def _until_damage(found: list[bytes]) -> Iterator[None]:
    """Suppress the error of a damaged batch if records were found before it: the next request gets the error."""
    try:
        yield
    except CorruptBatch:
        if not found:
            raise


async def read(request: RestRequest) -> RestResponse | StreamedResponse:
    """Return a page of records, or stream them as lines."""
    request.check_topic(Operation.READ, request.path["topic"])
    if request.media == media_types.NDJSON:
        return StreamedResponse(_lines(request), media_types.NDJSON)
    return RestResponse(await request.work(_page, request))


def _page(request: RestRequest) -> bytes:
    query: ReadQuery = request.query
    log = _log(request)
    start = _start(log, query)
    left = min(query.max or _PAGE_RECORDS, _PAGE_RECORDS_MAX)
    end = log.end_offset(isolation=query.isolation, durable_only=query.durable_only)
    found: list[bytes] = []
    next_offset, size = max(start, 0), 0
    with LargeBatchSlot() as slot, _until_damage(found):
        for batch in log.read(start, _PAGE_BYTES, isolation=query.isolation, durable_only=query.durable_only):
            slot.acquire_for(batch)
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


async def _lines(request: RestRequest) -> AsyncIterator[bytes]:
    pieces = await request.work(_pieces, request)
    coming = asyncio.ensure_future(request.work(next, pieces, None))
    wait_for_disconnect = asyncio.ensure_future(request.body.wait_for_disconnect())
    try:
        while (piece := await coming) is not None and not (wait_for_disconnect.done() or request.context.is_closing):
            coming = asyncio.ensure_future(request.work(next, pieces, None))  # render it while `piece` is sent
            yield piece
    finally:
        wait_for_disconnect.cancel()
        if not coming.done():
            await asyncio.wait([coming])


def _pieces(request: RestRequest) -> Iterator[bytes]:
    """Check the offset at once, and return the iterator over lines."""
    query: ReadQuery = request.query
    log = _log(request)
    start = _start(log, query)
    log.check_position(start)
    return _merge_chunks(_render(log, start, query))


def _merge_chunks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Merge small chunks of lines, because each chunk costs a thread switch and a write."""
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
    """Yield lines up to the end offset at the start of the request. So the response ends while producers append."""
    end = log.end_offset(isolation=query.isolation, durable_only=query.durable_only)
    left: Any = query.max or float("inf")
    at = start
    while at < end and left > 0:
        found, reached, left = _read_some(log, at, end, left, query)
        yield from found
        if reached == at:
            return
        at = reached


def _read_some(log: Partition, at: int, end: int, left: Any, query: ReadQuery) -> tuple[list[bytes], int, Any]:
    """Return lines, the offset after them and the number of records left.

    Between two calls no batch is in memory, however slowly the client reads.
    """
    found: list[bytes] = []
    size = 0
    with LargeBatchSlot() as slot, _until_damage(found):
        for batch in log.read(at, _READ_BYTES, isolation=query.isolation, durable_only=query.durable_only):
            if batch.base_offset >= end:
                return found, end, left
            slot.acquire_for(batch)
            for part in parts(batch, end):
                taken = part if len(part) <= left else part.slice(0, int(left))
                found.append(bare_values(taken) if query.form == "values" else lines(taken, query.values))
                size += len(found[-1])
                left -= len(taken)
                at = taken.next_offset
                if left <= 0 or size >= _RENDER_BYTES:
                    return found, at, left
            at = batch.next_offset
    return found, at, left
