"""Consumer instances: made, subscribed, read, committed, deleted."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

from segmentlog.errors import SegmentlogError
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.path_names import segment
from segmentlog.http.rest import media_types, rest_error_codes
from segmentlog.http.rest.consumer_instances import Instance as Held
from segmentlog.http.rest.consumer_instances import InstanceSettings
from segmentlog.http.rest.instance_reader import GroupReader, ReaderOptions, Reset, illegal
from segmentlog.http.rest.responses import Reply, encode_json, json_reply, nothing
from segmentlog.http.rest.v2.v2_models import (
    CommittedOffsets,
    ConsumedRecord,
    Instance,
    NewInstance,
    OneOffset,
    OnePartition,
    Partitions,
    Subscribed,
)
from segmentlog.http.rest.value_formats import json_of_bytes, text_of_bytes
from segmentlog.quantities import milliseconds_of
from segmentlog.records import Record, TopicPartition
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from segmentlog.http.rest.rest_request import Call

_TIMEOUT_MS: Final = 1000
_MAX_BYTES: Final = 16 << 20
_LOOK_S: Final = 0.02
"""How often somebody who waits for records looks whether there are any, which takes microseconds..."""
_POLL_S: Final = 0.5
"""...and how often he takes part in the group, which takes a thread."""
_WITHOUT_SCHEMA: Final = ("binary", "json")
_RESETS: Final = {"earliest": "earliest", "latest": "latest", "none": "error", None: "latest"}


def _check_group(call: Call) -> str:
    group: str = call.path["group"]
    call.check(Operation.READ, ResourceType.GROUP, group)
    return group


def _check_format(call: Call, name: str) -> None:
    """Raises `Forbidden` where records would be decoded by schemas that who asks may not see."""
    if name not in _WITHOUT_SCHEMA:
        call.check_schemas()


def _using(call: Call) -> Any:
    """The instance in the path, for this request."""
    return call.rest.instances.using(call.site.principal(call.connection), _check_group(call), call.path["instance"])


def _may_read(call: Call) -> Callable[[str], bool]:
    return lambda topic: call.allows(Operation.READ, ResourceType.TOPIC, topic)


def _partitions(call: Call, wanted: Iterable[OnePartition | OneOffset]) -> list[TopicPartition]:
    """Those in a request, which whoever asks may read."""
    found = [TopicPartition(one.topic, one.partition) for one in wanted]
    for topic in {tp.topic for tp in found}:
        call.check_topic(Operation.READ, topic)
    return found


# ------------------------------------------------------------ made and deleted


async def create(call: Call) -> Reply:
    """Make an instance, which reads nothing yet."""
    group = _check_group(call)
    call.store.check_writable("join a group")
    asked: NewInstance = await call.document() or NewInstance()
    _check_format(call, asked.format or "binary")
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
    principal = call.site.principal(call.connection)
    made = call.rest.instances.make(principal, group, asked.id or asked.name, options, settings)
    uri = f"{call.base_url}/consumers/{segment(group)}/instances/{segment(made.name)}"
    return json_reply(Instance(made.name, uri), content_type=call.media)


async def delete(call: Call) -> Reply:
    """Close it."""
    group = _check_group(call)
    await call.rest.instances.remove(call.site.principal(call.connection), group, call.path["instance"])
    return nothing()


# ------------------------------------------------------------ what it reads


async def subscribe(call: Call) -> Reply:
    """Share topics, or those that match a pattern, with the group's other members."""
    asked = await call.document()
    async with _using(call) as instance:
        if (asked.topics is None) == (asked.topic_pattern is None):
            raise illegal("a subscription is to topics or to a topic_pattern, one of them")
        for topic in asked.topics or ():
            call.check_topic(Operation.READ, topic)
        topics = sorted(set(asked.topics or ()))
        await call.work(instance.reader.subscribe, topics, asked.topic_pattern, _may_read(call))
    return nothing()


async def subscription(call: Call) -> Reply:
    """The topics that it subscribes to."""
    async with _using(call) as instance:
        return json_reply(Subscribed(instance.reader.subscription()), content_type=call.media)


async def unsubscribe(call: Call) -> Reply:
    """Read nothing any more."""
    async with _using(call) as instance:
        await call.work(instance.reader.unsubscribe)
    return nothing()


async def assign(call: Call) -> Reply:
    """Read partitions by hand."""
    asked = await call.document()
    async with _using(call) as instance:
        await call.work(instance.reader.assign, _partitions(call, asked.partitions))
    return nothing()


async def assignments(call: Call) -> Reply:
    """The partitions that it reads."""
    async with _using(call) as instance:
        found = await call.work(instance.reader.assignment)
    return json_reply(Partitions([OnePartition(*tp) for tp in found]), content_type=call.media)


# ------------------------------------------------------------ positions


async def commit(call: Call) -> Reply:
    """Commit what was handed out, or the given offsets: those of the last records that were processed."""
    asked = await call.document()
    async with _using(call) as instance:
        positions = None
        if asked is not None and asked.offsets is not None:
            tps = _partitions(call, asked.offsets)
            positions = {tp: (one.offset + 1, one.metadata or "") for tp, one in zip(tps, asked.offsets, strict=True)}
        reader: GroupReader = instance.reader
        await call.work(lambda: reader.commit(positions, sync=not call.query.async_))
    return json_reply([], content_type=call.media)


async def committed(call: Call) -> Reply:
    """Where the group goes on, in the partitions of the body."""
    asked = await call.document()
    async with _using(call) as instance:
        tps = _partitions(call, asked.partitions)
        found = await call.work(instance.reader.committed, tps)
    offsets = [OneOffset(tp.topic, tp.partition, offset, text) for tp, offset, text in found]
    return json_reply(CommittedOffsets(offsets), content_type=call.media)


async def seek(call: Call) -> Reply:
    """Go on at offsets, or at times."""
    asked = await call.document()
    times = [_milliseconds(one.timestamp) for one in asked.timestamps]
    async with _using(call) as instance:
        offsets = _partitions(call, asked.offsets)
        stamped = _partitions(call, asked.timestamps)

        def move() -> None:
            for tp, one in zip(offsets, asked.offsets, strict=True):
                instance.reader.seek(tp, one.offset)
            for tp, milliseconds in zip(stamped, times, strict=True):
                instance.reader.seek(tp, milliseconds, from_time=True)

        await call.work(move)
    return nothing()


def _milliseconds(text: str) -> int:
    try:
        return milliseconds_of(datetime.fromisoformat(text))
    except ValueError:
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"{text!r} is no time as ISO 8601 has it",
            error_code=rest_error_codes.INVALID_PAYLOAD,
        ) from None  # fmt: skip


async def seek_to_beginning(call: Call) -> Reply:
    """Go on at the first records that there are."""
    return await _seek_to(call, "earliest")


async def seek_to_end(call: Call) -> Reply:
    """Go on behind the last records that there are."""
    return await _seek_to(call, "latest")


async def _seek_to(call: Call, to: str) -> Reply:
    asked = await call.document()
    async with _using(call) as instance:
        tps = _partitions(call, asked.partitions)

        def move() -> None:
            for tp in tps or instance.reader.assignment():
                instance.reader.seek(tp, to)

        await call.work(move)
    return nothing()


# ------------------------------------------------------------ records


async def records(call: Call) -> Reply:
    """What comes next; waits for it as long as the client says."""
    async with _using(call) as instance:
        settings: InstanceSettings = instance.settings
        _check_format(call, settings.format)
        wanted = media_types.V2_EMBEDDED[settings.format]
        if call.media not in (wanted, media_types.V2):
            raise HttpProblem(
                HTTPStatus.NOT_ACCEPTABLE,
                f"this consumer was made for the format {settings.format!r}: accept {wanted}",
                error_code=rest_error_codes.FORMAT_MISMATCH,
            )
        timeout_ms = settings.timeout_ms
        if call.query.timeout > 0:
            timeout_ms = min(call.query.timeout, timeout_ms)
        max_bytes = min(call.query.max_bytes, _MAX_BYTES) if call.query.max_bytes > 0 else _MAX_BYTES
        found = await _gather(call, instance, max_bytes, min(settings.min_bytes, max_bytes), timeout_ms / 1000)
        body = await call.work(_render, call, instance.reader, found, settings.format)
    return Reply(body, content_type=wanted)


async def _gather(call: Call, instance: Held, max_bytes: int, min_bytes: int, timeout_s: float) -> list[Record]:
    reader, may_read = instance.reader, _may_read(call)
    ends_s = time.monotonic() + timeout_s
    found: list[Record] = []
    size = 0
    try:
        while True:
            more = await call.work(reader.records, max_bytes - size, may_read)
            found += more
            size += sum(len(record.key or b"") + len(record.value or b"") for record in more)
            polled_s = now_s = time.monotonic()
            while size < min_bytes and now_s < ends_s and not (instance.is_closing or call.site.is_closing):
                await asyncio.sleep(min(_LOOK_S, ends_s - now_s))
                now_s = time.monotonic()
                if reader.has_more() or now_s - polled_s >= _POLL_S:
                    break
            else:
                return found
    except (SegmentlogError, OSError) as error:
        if found and not isinstance(error, HttpProblem):
            return found  # whoever asks next is told
        await call.work(reader.give_back, found)
        raise
    except BaseException:
        reader.give_back(found)
        raise


def _render(call: Call, reader: GroupReader, found: list[Record], name: str) -> bytes:
    """As JSON. What cannot be told is given back, and is first in the next answer, which says so."""
    lines: list[bytes] = []
    try:
        for record in found:
            try:
                lines.append(_line(call, record, name))
            except (ValueError, LookupError, RecursionError, SegmentlogError) as error:
                if lines:
                    reader.give_back(found[len(lines) :])
                    break
                where = f"{record.topic}/{record.partition}, offset {record.offset}"
                raise HttpProblem(
                    HTTPStatus.UNPROCESSABLE_ENTITY,
                    f"the record at {where} is not of the format {name!r}: {error}; go on behind it (positions), or"
                    " read it with an instance for binary",
                    error_code=rest_error_codes.CONVERSION_FAILED,
                ) from None
        body = b"[" + b",".join(lines) + b"]"
    except BaseException:
        reader.give_back(found)
        raise
    reader.delivered()  # not before all of it is there
    return body


def _line(call: Call, record: Record, name: str) -> bytes:
    key, value = _embedded(call, record.key, name), _embedded(call, record.value, name)
    return encode_json(ConsumedRecord(record.topic, key, value, record.partition, record.offset))


def _embedded(call: Call, data: bytes | None, name: str) -> Any:
    if name == "binary":
        return text_of_bytes(data)
    if name == "json":
        return json_of_bytes(data)
    if data is None:
        return None
    return call.rest.schemas.read(data)
