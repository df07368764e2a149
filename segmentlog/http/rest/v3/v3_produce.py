"""Records one by one: objects that come one behind the other, and an outcome for each, for as long as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.format.file_names import SCHEMAS_TOPIC
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import rest_error_codes
from segmentlog.http.rest.batch_append import Records
from segmentlog.http.rest.json_stream import Malformed, Objects
from segmentlog.http.rest.media_types import JSON
from segmentlog.http.rest.responses import Flow, Reply, encode_json, json_reply
from segmentlog.http.rest.v3 import record_models
from segmentlog.http.rest.v3.v3_links import Links
from segmentlog.http.rest.v3.v3_topics import visible_topic
from segmentlog.http.rest.value_formats import NULL, SchemaWish
from segmentlog.quantities import milliseconds_of
from segmentlog.schemas.registry_errors import registration_problem
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call

_BETWEEN: Final = b"\r\n"
_OBJECT_MAX: Final = 32 << 20
_decoder = msgspec.json.Decoder(record_models.NewRecord)
_document = msgspec.json.Decoder().decode


def _decode(data: bytes) -> record_models.NewRecord:
    if not data.isascii():
        data.decode()
    return _decoder.decode(data)


class Encoded:
    """One record as it is appended, and what its answer says of it."""

    __slots__ = ("headers", "key", "key_size", "partition", "timestamp", "value", "value_size")

    def __init__(self, call: Call, topic: str, asked: record_models.NewRecord) -> None:
        """Raises `HttpProblem` and `SegmentlogError` for what cannot be appended."""
        if asked.partition_id is not None and asked.partition_id < 0:
            raise _no_partition()
        self.partition = asked.partition_id
        self.headers = tuple((header.name, header.value) for header in asked.headers)
        self.timestamp = _milliseconds(asked.timestamp)
        self.key, self.key_size = _encode(call, topic, asked.key, is_key=True)
        self.value, self.value_size = _encode(call, topic, asked.value, is_key=False)


def _no_partition() -> HttpProblem:
    return HttpProblem(
        HTTPStatus.NOT_FOUND, "This server does not host this topic-partition.",
        error_code=rest_error_codes.UNKNOWN_TOPIC_OR_PARTITION,
    )  # fmt: skip


def _problem(call: Call, error: BaseException) -> HttpProblem:
    return call.site.without_place(rest_error_codes.v3_problem(error))


def _bad(message: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.BAD_REQUEST, f"Bad Request: {message}")


def _milliseconds(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return milliseconds_of(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))
    except ValueError:
        raise _bad(f"timestamp={text!r} is no time as ISO 8601 has it.") from None


def _encode(
    call: Call, topic: str, asked: record_models.Data | None, *, is_key: bool
) -> tuple[bytes | None, record_models.Size | None]:
    if asked is None:
        return None, None
    data = bytes(asked.data)
    if asked.type == "JSON":
        encoded = None if data == NULL else data
    elif asked.type in ("BINARY", "STRING"):
        encoded = _text(asked.type, data)
    else:
        return _by_schema(call, topic, asked, data, is_key=is_key)
    return encoded, record_models.Size(len(encoded or b""), asked.type)


def _text(kind: str, data: bytes) -> bytes | None:
    """Base64, or text."""
    if kind == "STRING":
        what, wanted = "string", str
    else:
        what, wanted = "base64 string", bytes  # type: ignore[assignment]
    try:
        found: Any = msgspec.json.decode(data, type=wanted | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _bad(f"data={data[:100].decode(errors='replace')} is not a {what}.") from None
    return found.encode() if isinstance(found, str) else found


def _by_schema(
    call: Call, topic: str, asked: record_models.Data, data: bytes, *, is_key: bool
) -> tuple[bytes | None, record_models.Size | None]:
    if asked.schema is not None:
        call.check_topic(Operation.WRITE, SCHEMAS_TOPIC)
    else:
        call.check_schemas()
    wish = SchemaWish(
        format=None if asked.type is None else asked.type.lower(),
        schema_id=asked.schema_id, schema=asked.schema, subject=asked.subject,
        strategy=asked.subject_name_strategy, version=asked.schema_version,
    )  # fmt: skip
    try:
        writer = call.rest.schemas.writer(topic, wish, is_key=is_key)
    except (ValueError, LookupError) as error:
        raise _bad(registration_problem(error, may_see=call.may_see(Thing.SCHEMAS))) from None
    try:
        encoded = None if data == NULL else writer.encode(_document(data))
    except (ValueError, RecursionError) as error:
        raise _bad(str(error)) from None
    size = record_models.Size(
        len(encoded or b""), writer.format.upper(), writer.subject, writer.schema_id, writer.version
    )
    return encoded, size


# ---------------------------------------------------------------- one after the other

_Outcome = Encoded | HttpProblem
_Told = tuple[int, int, int]
"""(partition, offset, milliseconds)."""


def _append(call: Call, topic: str, found: Sequence[_Outcome]) -> list[_Told | HttpProblem]:
    """Append those that can be, with as few appends as there are partitions; what became of each."""
    told: list[_Told | HttpProblem] = [one if isinstance(one, HttpProblem) else _no_partition() for one in found]
    count = call.store.topic(topic).partition_count
    rows = [
        row for row, one in enumerate(found)
        if isinstance(one, Encoded) and (one.partition is None or one.partition < count)
    ]  # fmt: skip
    if not rows:
        return told
    ready: list[Any] = [found[row] for row in rows]
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    stamps = [now_ms if one.timestamp is None else one.timestamp for one in ready]
    keys = [one.key for one in ready]
    records = Records(
        [one.value for one in ready],
        None if keys.count(None) == len(keys) else keys,
        None if all(one.partition is None for one in ready) else [one.partition for one in ready],
        stamps,
        [one.headers for one in ready] if any(one.headers for one in ready) else None,
    )
    placed = call.rest.appending.append(topic, records, call.query.ack)
    for row, stamp, (partition, offset, error) in zip(rows, stamps, placed.outcomes(), strict=True):
        told[row] = (partition, offset, stamp) if error is None else _problem(call, error)
    return told


def _encoded(call: Call, topic: str, asked: Any) -> _Outcome:
    if isinstance(asked, msgspec.ValidationError):
        return _bad(str(asked))
    try:
        return Encoded(call, topic, asked)
    except (SegmentlogError, OSError) as error:
        return _problem(call, error)


def _time(milliseconds: int) -> str:
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def produce(call: Call) -> Flow:
    """Outcomes come as records come."""
    links = Links(call)
    topic = (await call.work(visible_topic, call, Operation.WRITE)).name
    call.store.check_writable("append")
    return Flow(_outcomes(call, links.cluster_id, topic), JSON)


async def _outcomes(call: Call, cluster_id: str, topic: str) -> AsyncIterator[bytes]:
    objects = Objects(_decode, _OBJECT_MAX)
    is_any = False

    def handle(piece: bytes | None) -> tuple[bytes, bool]:
        """(outcomes of the records that end in a piece, whether that was the last)."""
        asked: list[Any] = []
        problem: HttpProblem | None = None
        try:
            if piece is None:
                objects.finish()
            else:
                asked.extend(objects.feed(piece))
        except Malformed as error:
            problem = _bad(f"Error processing JSON: {error}")
        found: list[Encoded | HttpProblem] = [_encoded(call, topic, one) for one in asked]
        if problem is not None:
            found.append(problem)
        try:
            call.check_topic(Operation.WRITE, topic)  # the client may go on for hours
            told = _append(call, topic, found)
        except (SegmentlogError, OSError) as error:
            told = [_problem(call, error)] * len(found)
        lines = [_outcome(cluster_id, topic, one, what) for one, what in zip(found, told, strict=True)]
        return b"".join(lines), problem is not None

    try:
        async for piece in call.body.pieces():
            outcomes, is_last = await call.append(handle, piece)
            await call.body.keep(objects.kept_bytes)
            if outcomes:
                is_any = True
                yield outcomes
            if is_last:
                return
    except HttpProblem as problem:  # more than a request may have
        if not is_any:
            raise
        yield encode_json(record_models.Produced(problem.error_code, problem.message)) + _BETWEEN
        return
    outcomes, _ = await call.append(handle, None)
    if outcomes:
        yield outcomes
    elif not is_any:
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, "Payload error. Request body is empty. Data is required.",
            error_code=rest_error_codes.INVALID_PAYLOAD,
        )  # fmt: skip


def _outcome(cluster_id: str, topic: str, one: _Outcome, told: _Told | HttpProblem) -> bytes:
    if isinstance(told, HttpProblem) or isinstance(one, HttpProblem):
        problem = told if isinstance(told, HttpProblem) else one
        assert isinstance(problem, HttpProblem)
        return encode_json(record_models.Produced(problem.error_code, problem.message)) + _BETWEEN
    partition, offset, milliseconds = told
    return encode_json(
        record_models.Produced(
            int(HTTPStatus.OK), cluster_id=cluster_id, topic_name=topic, partition_id=partition, offset=offset,
            timestamp=_time(milliseconds),
            key=msgspec.UNSET if one.key_size is None else one.key_size,
            value=msgspec.UNSET if one.value_size is None else one.value_size,
        )
    ) + _BETWEEN  # fmt: skip


async def produce_batch(call: Call) -> Reply:
    """Records with names of their own, and their outcomes by these."""
    links = Links(call)
    topic = (await call.work(visible_topic, call, Operation.WRITE)).name
    call.store.check_writable("append")
    body = await call.body.whole()

    def handle() -> record_models.ProducedEntries:
        asked: record_models.Entries = call.decode(body)
        if len({entry.id for entry in asked.entries}) < len(asked.entries):
            raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "Batch entry IDs are not distinct.", error_code=42208)
        found = [_encoded(call, topic, entry) for entry in asked.entries]
        answer = record_models.ProducedEntries([], [])
        for entry, one, what in zip(asked.entries, found, _append(call, topic, found), strict=True):
            if isinstance(what, HttpProblem) or isinstance(one, HttpProblem):
                problem = what if isinstance(what, HttpProblem) else one
                assert isinstance(problem, HttpProblem)
                answer.failures.append(record_models.Failure(entry.id, problem.error_code, problem.message))
            else:
                answer.successes.append(
                    record_models.Success(
                        entry.id, links.cluster_id, topic, what[0], what[1], _time(what[2]),
                        msgspec.UNSET if one.key_size is None else one.key_size,
                        msgspec.UNSET if one.value_size is None else one.value_size,
                    )
                )  # fmt: skip
        return answer

    return json_reply(await call.append(handle), HTTPStatus.MULTI_STATUS)
