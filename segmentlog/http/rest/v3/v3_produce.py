"""REST v3 endpoints that append records: a stream of JSON objects with an outcome for each, or one batch."""

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
from segmentlog.http.rest.batch_append import RecordLists
from segmentlog.http.rest.json_stream import JsonObjectSplitter, MalformedJson
from segmentlog.http.rest.media_types import JSON
from segmentlog.http.rest.responses import RestResponse, StreamedResponse, encode_json, json_response
from segmentlog.http.rest.v3 import record_models
from segmentlog.http.rest.v3.v3_links import Links
from segmentlog.http.rest.v3.v3_topics import visible_topic
from segmentlog.http.rest.value_formats import NULL, SchemaSelector
from segmentlog.quantities import milliseconds_of
from segmentlog.schemas.registry_errors import registration_problem
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest

_BETWEEN: Final = b"\r\n"
_OBJECT_MAX: Final = 32 << 20
_decoder = msgspec.json.Decoder(record_models.NewRecord)
_document = msgspec.json.Decoder().decode


def _decode(data: bytes) -> record_models.NewRecord:
    if not data.isascii():
        data.decode()
    return _decoder.decode(data)


class EncodedRecord:
    """One record in stored form, and the sizes that its outcome reports."""

    __slots__ = ("headers", "key", "key_size", "partition", "timestamp", "value", "value_size")

    def __init__(self, request: RestRequest, topic: str, asked: record_models.NewRecord) -> None:
        """Encode a record. Raises `HttpProblem` and `SegmentlogError`."""
        if asked.partition_id is not None and asked.partition_id < 0:
            raise _no_partition()
        self.partition = asked.partition_id
        self.headers = tuple((header.name, header.value) for header in asked.headers)
        self.timestamp = _milliseconds(asked.timestamp)
        self.key, self.key_size = _encode(request, topic, asked.key, is_key=True)
        self.value, self.value_size = _encode(request, topic, asked.value, is_key=False)


def _no_partition() -> HttpProblem:
    return HttpProblem(
        HTTPStatus.NOT_FOUND, "This server does not host this topic-partition.",
        error_code=rest_error_codes.UNKNOWN_TOPIC_OR_PARTITION,
    )  # fmt: skip


def _problem(request: RestRequest, error: BaseException) -> HttpProblem:
    return request.context.redact_problem(rest_error_codes.v3_problem(error))


def _bad(message: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.BAD_REQUEST, f"Bad Request: {message}")


def _milliseconds(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return milliseconds_of(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))
    except ValueError:
        raise _bad(f"timestamp={text!r} is not in ISO 8601.") from None


def _encode(
    request: RestRequest, topic: str, asked: record_models.RecordData | None, *, is_key: bool
) -> tuple[bytes | None, record_models.EncodedSize | None]:
    if asked is None:
        return None, None
    data = bytes(asked.data)
    if asked.type == "JSON":
        encoded = None if data == NULL else data
    elif asked.type in ("BINARY", "STRING"):
        encoded = _text(asked.type, data)
    else:
        return _by_schema(request, topic, asked, data, is_key=is_key)
    return encoded, record_models.EncodedSize(len(encoded or b""), asked.type)


def _text(kind: str, data: bytes) -> bytes | None:
    """Decode a base64 string, or a string."""
    type_name = "string" if kind == "STRING" else "base64 string"
    try:
        found: Any = msgspec.json.decode(data, type=(str | None) if kind == "STRING" else (bytes | None))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _bad(f"data={data[:100].decode(errors='replace')} is not a {type_name}.") from None
    return found.encode() if isinstance(found, str) else found


def _by_schema(
    request: RestRequest, topic: str, asked: record_models.RecordData, data: bytes, *, is_key: bool
) -> tuple[bytes | None, record_models.EncodedSize | None]:
    if asked.schema is not None:
        request.check_topic(Operation.WRITE, SCHEMAS_TOPIC)
    else:
        request.check_schemas()
    selector = SchemaSelector(
        format=None if asked.type is None else asked.type.lower(),
        schema_id=asked.schema_id, schema=asked.schema, subject=asked.subject,
        strategy=asked.subject_name_strategy, version=asked.schema_version,
    )  # fmt: skip
    try:
        writer = request.rest.schemas.writer(topic, selector, is_key=is_key)
    except (ValueError, LookupError) as error:
        raise _bad(registration_problem(error, may_see=request.may_see(Thing.SCHEMAS))) from None
    try:
        encoded = None if data == NULL else writer.encode(_document(data))
    except (ValueError, RecursionError) as error:
        raise _bad(str(error)) from None
    size = record_models.EncodedSize(
        len(encoded or b""), writer.format.upper(), writer.subject, writer.schema_id, writer.version
    )
    return encoded, size


# ---------------------------------------------------------------- streams of records

_EncodedOrProblem = EncodedRecord | HttpProblem
_Appended = tuple[int, int, int]
"""(partition, offset, timestamp in ms)."""


def _append(request: RestRequest, topic: str, found: Sequence[_EncodedOrProblem]) -> list[_Appended | HttpProblem]:
    """Append the valid records, with one append for each partition, and return the outcome of each record."""
    results: list[_Appended | HttpProblem] = [one if isinstance(one, HttpProblem) else _no_partition() for one in found]
    count = request.store.topic(topic).partition_count
    rows = [
        row for row, one in enumerate(found)
        if isinstance(one, EncodedRecord) and (one.partition is None or one.partition < count)
    ]  # fmt: skip
    if not rows:
        return results
    ready: list[Any] = [found[row] for row in rows]
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    stamps = [now_ms if one.timestamp is None else one.timestamp for one in ready]
    keys = [one.key for one in ready]
    records = RecordLists(
        [one.value for one in ready],
        None if keys.count(None) == len(keys) else keys,
        None if all(one.partition is None for one in ready) else [one.partition for one in ready],
        stamps,
        [one.headers for one in ready] if any(one.headers for one in ready) else None,
    )
    result = request.rest.appender.append(topic, records, request.query.ack)
    for row, stamp, (partition, offset, error) in zip(rows, stamps, result.outcomes(), strict=True):
        results[row] = (partition, offset, stamp) if error is None else _problem(request, error)
    return results


def _encoded(request: RestRequest, topic: str, asked: Any) -> _EncodedOrProblem:
    if isinstance(asked, msgspec.ValidationError):
        return _bad(str(asked))
    try:
        return EncodedRecord(request, topic, asked)
    except (SegmentlogError, OSError) as error:
        return _problem(request, error)


def _time(milliseconds: int) -> str:
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def produce(request: RestRequest) -> StreamedResponse:
    """Append records as they arrive, and stream their outcomes."""
    links = Links(request)
    topic = (await request.work(visible_topic, request, Operation.WRITE)).name
    request.store.check_writable("append")
    return StreamedResponse(_outcomes(request, links.cluster_id, topic), JSON)


async def _outcomes(request: RestRequest, cluster_id: str, topic: str) -> AsyncIterator[bytes]:
    objects = JsonObjectSplitter(_decode, _OBJECT_MAX)
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
        except MalformedJson as error:
            problem = _bad(f"Error processing JSON: {error}")
        found: list[EncodedRecord | HttpProblem] = [_encoded(request, topic, one) for one in asked]
        if problem is not None:
            found.append(problem)
        try:
            request.check_topic(Operation.WRITE, topic)  # the request may take hours: check the rights again
            results = _append(request, topic, found)
        except (SegmentlogError, OSError) as error:
            results = [_problem(request, error)] * len(found)
        lines = [_outcome(cluster_id, topic, one, what) for one, what in zip(found, results, strict=True)]
        return b"".join(lines), problem is not None

    try:
        async for piece in request.body.pieces():
            outcomes, is_last = await request.append(handle, piece)
            await request.body.reserve(objects.buffered_bytes)
            if outcomes:
                is_any = True
                yield outcomes
            if is_last:
                return
    except HttpProblem as problem:  # the body is too large
        if not is_any:
            raise
        yield encode_json(record_models.ProduceResponse(problem.error_code, problem.message)) + _BETWEEN
        return
    outcomes, _ = await request.append(handle, None)
    if outcomes:
        yield outcomes
    elif not is_any:
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, "Payload error. Request body is empty. Data is required.",
            error_code=rest_error_codes.INVALID_PAYLOAD,
        )  # fmt: skip


def _outcome(cluster_id: str, topic: str, record: _EncodedOrProblem, result: _Appended | HttpProblem) -> bytes:
    if isinstance(result, HttpProblem) or isinstance(record, HttpProblem):
        problem = result if isinstance(result, HttpProblem) else record
        assert isinstance(problem, HttpProblem)
        return encode_json(record_models.ProduceResponse(problem.error_code, problem.message)) + _BETWEEN
    partition, offset, milliseconds = result
    return encode_json(
        record_models.ProduceResponse(
            int(HTTPStatus.OK), cluster_id=cluster_id, topic_name=topic, partition_id=partition, offset=offset,
            timestamp=_time(milliseconds),
            key=msgspec.UNSET if record.key_size is None else record.key_size,
            value=msgspec.UNSET if record.value_size is None else record.value_size,
        )
    ) + _BETWEEN  # fmt: skip


async def produce_batch(request: RestRequest) -> RestResponse:
    """Append records with ids, and return the outcome of each id."""
    links = Links(request)
    topic = (await request.work(visible_topic, request, Operation.WRITE)).name
    request.store.check_writable("append")
    body = await request.body.read_all()

    def handle() -> record_models.ProduceBatchResponse:
        asked: record_models.BatchEntries = request.decode(body)
        if len({entry.id for entry in asked.entries}) < len(asked.entries):
            raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "Batch entry IDs are not distinct.", error_code=42208)
        found = [_encoded(request, topic, entry) for entry in asked.entries]
        answer = record_models.ProduceBatchResponse([], [])
        for entry, one, what in zip(asked.entries, found, _append(request, topic, found), strict=True):
            if isinstance(what, HttpProblem) or isinstance(one, HttpProblem):
                problem = what if isinstance(what, HttpProblem) else one
                assert isinstance(problem, HttpProblem)
                answer.failures.append(record_models.BatchFailure(entry.id, problem.error_code, problem.message))
            else:
                answer.successes.append(
                    record_models.BatchSuccess(
                        entry.id, links.cluster_id, topic, what[0], what[1], _time(what[2]),
                        msgspec.UNSET if one.key_size is None else one.key_size,
                        msgspec.UNSET if one.value_size is None else one.value_size,
                    )
                )  # fmt: skip
        return answer

    return json_response(await request.append(handle), HTTPStatus.MULTI_STATUS)
