"""REST v2 endpoints of consumer instances."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

from segmentlog.errors import SegmentlogError
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.path_names import path_segment
from segmentlog.http.rest import media_types, rest_error_codes
from segmentlog.http.rest.consumer_instances import ConsumerInstance, InstanceSettings
from segmentlog.http.rest.instance_reader import InstanceReader, ReaderOptions, Reset, illegal_state
from segmentlog.http.rest.responses import RestResponse, encode_json, json_response, no_content
from segmentlog.http.rest.v2.v2_models import (
    ConsumedRecord,
    CreatedInstance,
    GroupOffsets,
    NewInstance,
    PartitionOffset,
    PartitionRef,
    Subscribed,
    TopicPartitions,
)
from segmentlog.http.rest.value_formats import json_of_bytes, text_of_bytes
from segmentlog.quantities import milliseconds_of
from segmentlog.records import Record, TopicPartition
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from segmentlog.http.rest.rest_request import RestRequest

_TIMEOUT_MS: Final = 1000
_MAX_BYTES: Final = 16 << 20
_LOOK_S: Final = 0.02
"""Interval at which a waiting request checks for records, which takes microseconds."""
_POLL_S: Final = 0.5
"""Interval at which a waiting request polls the group, which needs a thread."""
_WITHOUT_SCHEMA: Final = ("binary", "json")
_RESETS: Final = {"earliest": "earliest", "latest": "latest", "none": "error", None: "latest"}


def _check_group(request: RestRequest) -> str:
    group: str = request.path["group"]
    request.check(Operation.READ, ResourceType.GROUP, group)
    return group


def _check_format(request: RestRequest, name: str) -> None:
    """Raise `Forbidden` if the format needs schemas that the principal may not see."""
    if name not in _WITHOUT_SCHEMA:
        request.check_schemas()


def _using(request: RestRequest) -> Any:
    """Lock the instance in the path for this request."""
    return request.rest.instances.locked(
        request.context.principal(request.connection), _check_group(request), request.path["instance"]
    )


def _may_read(request: RestRequest) -> Callable[[str], bool]:
    return lambda topic: request.allows(Operation.READ, ResourceType.TOPIC, topic)


def _partitions(request: RestRequest, refs: Iterable[PartitionRef | PartitionOffset]) -> list[TopicPartition]:
    """Return the partitions of the request, after checking that the principal may read them."""
    found = [TopicPartition(one.topic, one.partition) for one in refs]
    for topic in {tp.topic for tp in found}:
        request.check_topic(Operation.READ, topic)
    return found


# ------------------------------------------------------------ creation and deletion


async def create(request: RestRequest) -> RestResponse:
    """Create an instance, without a subscription."""
    group = _check_group(request)
    request.store.check_writable("join a group")
    asked: NewInstance = await request.document() or NewInstance()
    _check_format(request, asked.format or "binary")
    settings = InstanceSettings(
        format=asked.format or "binary",
        min_bytes=max(asked.fetch_min_bytes or 1, 1),
        timeout_ms=_TIMEOUT_MS if asked.request_timeout_ms is None else asked.request_timeout_ms,
    )
    options = ReaderOptions(
        reset=cast(Reset, _RESETS[asked.auto_offset_reset]),
        auto_commit=asked.auto_commit_enable not in (False, "false"),
        isolation=asked.isolation_level or "read_uncommitted",
    )
    principal = request.context.principal(request.connection)
    instance = request.rest.instances.create(principal, group, asked.id or asked.name, options, settings)
    uri = f"{request.base_url}/consumers/{path_segment(group)}/instances/{path_segment(instance.name)}"
    return json_response(CreatedInstance(instance.name, uri), content_type=request.media)


async def delete(request: RestRequest) -> RestResponse:
    """Close an instance."""
    group = _check_group(request)
    await request.rest.instances.remove(request.context.principal(request.connection), group, request.path["instance"])
    return no_content()


# ------------------------------------------------------------ subscription and assignment


async def subscribe(request: RestRequest) -> RestResponse:
    """Subscribe to topics, or to topics that match a pattern."""
    asked = await request.document()
    async with _using(request) as instance:
        if (asked.topics is None) == (asked.topic_pattern is None):
            raise illegal_state("a subscription must have either topics or topic_pattern")
        for topic in asked.topics or ():
            request.check_topic(Operation.READ, topic)
        topics = sorted(set(asked.topics or ()))
        await request.work(instance.reader.subscribe, topics, asked.topic_pattern, _may_read(request))
    return no_content()


async def subscription(request: RestRequest) -> RestResponse:
    """Return the topics of the subscription."""
    async with _using(request) as instance:
        return json_response(Subscribed(instance.reader.subscription()), content_type=request.media)


async def unsubscribe(request: RestRequest) -> RestResponse:
    """Remove the subscription or the assignment."""
    async with _using(request) as instance:
        await request.work(instance.reader.unsubscribe)
    return no_content()


async def assign(request: RestRequest) -> RestResponse:
    """Assign partitions without group membership."""
    asked = await request.document()
    async with _using(request) as instance:
        await request.work(instance.reader.assign, _partitions(request, asked.partitions))
    return no_content()


async def assignments(request: RestRequest) -> RestResponse:
    """Return the assigned partitions."""
    async with _using(request) as instance:
        found = await request.work(instance.reader.assignment)
    return json_response(TopicPartitions([PartitionRef(*tp) for tp in found]), content_type=request.media)


# ------------------------------------------------------------ positions


async def commit(request: RestRequest) -> RestResponse:
    """Commit all returned records, or the given offsets: each is that of the last record the client has processed."""
    asked = await request.document()
    async with _using(request) as instance:
        positions = None
        if asked is not None and asked.offsets is not None:
            tps = _partitions(request, asked.offsets)
            positions = {tp: (one.offset + 1, one.metadata or "") for tp, one in zip(tps, asked.offsets, strict=True)}
        reader: InstanceReader = instance.reader
        await request.work(lambda: reader.commit(positions, sync=not request.query.async_))
    return json_response([], content_type=request.media)


async def committed(request: RestRequest) -> RestResponse:
    """Return the group's committed offsets of these partitions."""
    asked = await request.document()
    async with _using(request) as instance:
        tps = _partitions(request, asked.partitions)
        found = await request.work(instance.reader.committed, tps)
    offsets = [PartitionOffset(tp.topic, tp.partition, offset, text) for tp, offset, text in found]
    return json_response(GroupOffsets(offsets), content_type=request.media)


async def seek(request: RestRequest) -> RestResponse:
    """Seek to offsets, or to the first records at or after given times."""
    asked = await request.document()
    times = [_milliseconds(one.timestamp) for one in asked.timestamps]
    async with _using(request) as instance:
        offsets = _partitions(request, asked.offsets)
        stamped = _partitions(request, asked.timestamps)

        def move() -> None:
            for tp, one in zip(offsets, asked.offsets, strict=True):
                instance.reader.seek(tp, one.offset)
            for tp, milliseconds in zip(stamped, times, strict=True):
                instance.reader.seek(tp, milliseconds, from_time=True)

        await request.work(move)
    return no_content()


def _milliseconds(text: str) -> int:
    try:
        return milliseconds_of(datetime.fromisoformat(text))
    except ValueError:
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"timestamp {text!r} is not in ISO 8601",
            error_code=rest_error_codes.INVALID_PAYLOAD,
        ) from None  # fmt: skip


async def seek_to_beginning(request: RestRequest) -> RestResponse:
    """Seek to the first records."""
    return await _seek_to(request, "earliest")


async def seek_to_end(request: RestRequest) -> RestResponse:
    """Seek to the end offsets."""
    return await _seek_to(request, "latest")


async def _seek_to(request: RestRequest, to: str) -> RestResponse:
    asked = await request.document()
    async with _using(request) as instance:
        tps = _partitions(request, asked.partitions)

        def move() -> None:
            for tp in tps or instance.reader.assignment():
                instance.reader.seek(tp, to)

        await request.work(move)
    return no_content()


# ------------------------------------------------------------ records


async def records(request: RestRequest) -> RestResponse:
    """Return the next records, after a wait of at most the client's time-out."""
    async with _using(request) as instance:
        settings: InstanceSettings = instance.settings
        _check_format(request, settings.format)
        media_type = media_types.V2_EMBEDDED[settings.format]
        if request.media not in (media_type, media_types.V2):
            raise HttpProblem(
                HTTPStatus.NOT_ACCEPTABLE,
                f"this consumer instance has the format {settings.format!r}; send the header Accept: {media_type}",
                error_code=rest_error_codes.FORMAT_MISMATCH,
            )
        timeout_ms = settings.timeout_ms
        if request.query.timeout > 0:
            timeout_ms = min(request.query.timeout, timeout_ms)
        max_bytes = min(request.query.max_bytes, _MAX_BYTES) if request.query.max_bytes > 0 else _MAX_BYTES
        found = await _gather(request, instance, max_bytes, min(settings.min_bytes, max_bytes), timeout_ms / 1000)
        body = await request.work(_render, request, instance.reader, found, settings.format)
    return RestResponse(body, content_type=media_type)


async def _gather(
    request: RestRequest, instance: ConsumerInstance, max_bytes: int, min_bytes: int, timeout_s: float
) -> list[Record]:
    reader, may_read = instance.reader, _may_read(request)
    ends_s = time.monotonic() + timeout_s
    found: list[Record] = []
    size = 0
    try:
        while True:
            more = await request.work(reader.read_records, max_bytes - size, may_read)
            found += more
            size += sum(len(record.key or b"") + len(record.value or b"") for record in more)
            polled_s = now_s = time.monotonic()
            while size < min_bytes and now_s < ends_s and not (instance.is_closing or request.context.is_closing):
                await asyncio.sleep(min(_LOOK_S, ends_s - now_s))
                now_s = time.monotonic()
                if reader.has_more() or now_s - polled_s >= _POLL_S:
                    break
            else:
                return found
    except (SegmentlogError, OSError) as error:
        if found and not isinstance(error, HttpProblem):
            return found  # the next request gets the error
        await request.work(reader.return_records, found)
        raise
    except BaseException:
        reader.return_records(found)
        raise


def _render(request: RestRequest, reader: InstanceReader, found: list[Record], name: str) -> bytes:
    """Encode records as JSON, up to the first record that cannot be encoded.

    If that is the first record, raise `HttpProblem`. Otherwise the next request reads it again, and gets the error.
    """
    lines: list[bytes] = []
    try:
        for record in found:
            try:
                lines.append(_line(request, record, name))
            except (ValueError, LookupError, RecursionError, SegmentlogError) as error:
                if lines:
                    reader.return_records(found[len(lines) :])
                    break
                where = f"{record.topic}/{record.partition}, offset {record.offset}"
                raise HttpProblem(
                    HTTPStatus.UNPROCESSABLE_ENTITY,
                    f"the record at {where} is not in the format {name!r}: {error}; seek past it (positions), or"
                    " read it with an instance of the format binary",
                    error_code=rest_error_codes.CONVERSION_FAILED,
                ) from None
        body = b"[" + b",".join(lines) + b"]"
    except BaseException:
        reader.return_records(found)
        raise
    reader.mark_delivered()  # only after the whole response is encoded
    return body


def _line(request: RestRequest, record: Record, name: str) -> bytes:
    key, value = _embedded(request, record.key, name), _embedded(request, record.value, name)
    return encode_json(ConsumedRecord(record.topic, key, value, record.partition, record.offset))


def _embedded(request: RestRequest, data: bytes | None, name: str) -> Any:
    if name == "binary":
        return text_of_bytes(data)
    if name == "json":
        return json_of_bytes(data)
    if data is None:
        return None
    return request.rest.schemas.read(data)
