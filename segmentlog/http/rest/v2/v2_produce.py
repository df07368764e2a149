"""REST v2 endpoint that appends records in the format of the content type."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from segmentlog.format.file_names import SCHEMAS_TOPIC, check_topic_name
from segmentlog.http.error_responses import HttpProblem, client_message
from segmentlog.http.rest import media_types, rest_error_codes
from segmentlog.http.rest.batch_append import AckName, BatchResult, RecordLists
from segmentlog.http.rest.responses import RestResponse, encode_json
from segmentlog.http.rest.v2.v2_models import ABSENT, BinaryRecords, JsonRecord, JsonRecords, SchemaRecords
from segmentlog.http.rest.value_formats import NULL, SchemaSelector, SchemaWriter, bytes_of_json
from segmentlog.schemas.registry_errors import registration_problem
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from segmentlog.http.rest.rest_request import RestRequest

FORMATS: Final = {content_type: name for name, content_type in media_types.V2_EMBEDDED.items()}
BODIES: Final = {
    media_types.V2_EMBEDDED["binary"]: BinaryRecords,
    media_types.V2_EMBEDDED["json"]: JsonRecords,
    media_types.V2_EMBEDDED["avro"]: SchemaRecords,
    media_types.V2_EMBEDDED["jsonschema"]: SchemaRecords,
    media_types.V2_EMBEDDED["protobuf"]: SchemaRecords,
}
_WITHOUT_SCHEMA: Final = frozenset((media_types.V2_EMBEDDED["binary"], media_types.V2_EMBEDDED["json"]))
_NON_BLOCKING_BYTES: Final = 128 << 10
"""Bodies up to this size are appended without a thread: that takes about a millisecond."""
_as_document = msgspec.json.Decoder().decode


async def produce(request: RestRequest) -> RestResponse:
    """Append records, and return the offset or the error of each."""
    topic = check_topic_name(request.path["topic"])
    request.check_topic(Operation.WRITE, topic)
    request.store.check_writable("append")
    body = await request.body.read_all()
    ack: AckName | None = request.query.ack
    partition: int | None = request.path.get("partition")
    is_small = len(body) <= _NON_BLOCKING_BYTES and request.content_type in _WITHOUT_SCHEMA
    if is_small and request.rest.appender.is_non_blocking(topic, ack):
        answer = _produce(request, topic, partition, ack, body)
    else:
        answer = await request.append(_produce_and_note, request, topic, partition, ack, body)
    return RestResponse(answer, content_type=request.media)


def _produce_and_note(
    request: RestRequest, topic: str, partition: int | None, ack: AckName | None, body: bytes
) -> bytes:
    answer = _produce(request, topic, partition, ack, body)
    request.rest.appender.open_partitions(topic)
    return answer


def _produce(request: RestRequest, topic: str, partition: int | None, ack: AckName | None, body: bytes) -> bytes:
    decoded = request.decode(body)
    key_schema_id = value_schema_id = None
    if isinstance(decoded, JsonRecords):
        records = _json_records(decoded.records)
    elif isinstance(decoded, BinaryRecords):
        found = decoded.records
        records = RecordLists([one.value for one in found], [one.key for one in found])
    else:
        records, key_schema_id, value_schema_id = _schema_records(request, topic, decoded)
    given = [one.partition for one in decoded.records]
    if partition is None and given.count(None) != len(given):
        records.partitions = given
    result = request.rest.appender.append(topic, records, ack, partition)
    return render(result, key_schema_id, value_schema_id, request.context.redact_paths)


def _json_records(found: Sequence[JsonRecord]) -> RecordLists:
    keys = _column([one.key for one in found])
    return RecordLists(_column([one.value for one in found]) or [None] * len(found), keys)


def _column(raws: list[Raw]) -> list[bytes | None] | None:
    """Return a column of the records to append, or None if all its values are absent, as is usual for keys."""
    if raws.count(ABSENT) == len(raws):
        return None
    if ABSENT in raws:
        return [None if raw is ABSENT else bytes_of_json(raw) for raw in raws]
    texts = list(map(bytes, raws))
    return [None if text == NULL else text for text in texts] if NULL in texts else list(texts)


def _schema_records(
    request: RestRequest, topic: str, decoded: SchemaRecords
) -> tuple[RecordLists, int | None, int | None]:
    """Return the encoded records, and the ids of their schemas."""
    schemas = request.rest.schemas
    name = FORMATS[request.content_type]

    def column(data: list[bytes], schema_id: int | None, schema: str | None, is_key: bool) -> SchemaWriter | None:
        if all(one == NULL for one in data):
            return None
        if schema_id is None and schema is None:
            code, what = (
                (rest_error_codes.KEY_SCHEMA_MISSING, "key")
                if is_key
                else (rest_error_codes.VALUE_SCHEMA_MISSING, "value")
            )
            raise HttpProblem(
                422,
                f"the request has {what}s but neither {what}_schema nor {what}_schema_id; nothing was appended",
                error_code=code,
            )
        return schemas.writer(topic, SchemaSelector(format=name, schema_id=schema_id, schema=schema), is_key=is_key)

    keys = [NULL if one.key is ABSENT else bytes(one.key) for one in decoded.records]
    values = [NULL if one.value is ABSENT else bytes(one.value) for one in decoded.records]
    if decoded.key_schema is not None or decoded.value_schema is not None:
        request.check_topic(Operation.WRITE, SCHEMAS_TOPIC)
    if decoded.key_schema_id is not None or decoded.value_schema_id is not None:
        request.check_schemas()
    try:
        key_writer = column(keys, decoded.key_schema_id, decoded.key_schema, True)
        value_writer = column(values, decoded.value_schema_id, decoded.value_schema, False)
    except (ValueError, LookupError) as error:
        message = registration_problem(error, may_see=request.may_see(Thing.SCHEMAS))
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, message, error_code=rest_error_codes.INVALID_SCHEMA
        ) from None
    return (
        RecordLists(_encoded(value_writer, values), None if key_writer is None else _encoded(key_writer, keys)),
        None if key_writer is None else key_writer.schema_id,
        None if value_writer is None else value_writer.schema_id,
    )


def _encoded(writer: SchemaWriter | None, data: list[bytes]) -> list[bytes | None]:
    if writer is None:
        return [None] * len(data)
    try:
        return [None if one == NULL else writer.encode(_as_document(one)) for one in data]
    except (ValueError, RecursionError) as error:
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, str(error), error_code=rest_error_codes.CONVERSION_FAILED
        ) from None


# ---------------------------------------------------------------- the response


def render(
    result: BatchResult,
    key_schema_id: int | None,
    value_schema_id: int | None,
    redact_paths: Callable[[str], str] = str,
) -> bytes:
    """Encode the result as JSON.

    Consecutive offsets are joined as text, which takes a tenth of the time of encoding.
    """
    schema_ids = b'],"key_schema_id":%b,"value_schema_id":%b}' % (
        encode_json(key_schema_id), encode_json(value_schema_id),
    )  # fmt: skip
    if len(result.parts) == 1 and not result.errors:
        partition, base_offset, _ = result.parts[0]
        begin, end = f'{{"partition":{partition},"offset":', ',"error_code":null,"error":null}'
        numbers = map(str, range(base_offset, base_offset + result.count))
        return b'{"offsets":[' + f"{begin}{f'{end},{begin}'.join(numbers)}{end}".encode() + schema_ids
    lines = [
        b'{"partition":%d,"offset":%d,"error_code":null,"error":null}' % (partition, offset)
        if error is None
        else encode_json(
            {
                "partition": None,
                "offset": None,
                "error_code": rest_error_codes.record_code(error),
                "error": redact_paths(client_message(error)),
            }
        )
        for partition, offset, error in result.outcomes()
    ]
    return b'{"offsets":[' + b",".join(lines) + schema_ids
