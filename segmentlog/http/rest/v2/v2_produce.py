"""Records to a topic, in the format that the content type says."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from segmentlog.format.file_names import SCHEMAS_TOPIC, check_topic_name
from segmentlog.http.error_responses import HttpProblem, words_of
from segmentlog.http.rest import media_types, rest_error_codes
from segmentlog.http.rest.batch_append import AckName, Placed, Records
from segmentlog.http.rest.responses import Reply, encode_json
from segmentlog.http.rest.v2.v2_models import ABSENT, BinaryRecords, JsonRecord, JsonRecords, SchemaRecords
from segmentlog.http.rest.value_formats import NULL, SchemaWish, SchemaWriter, bytes_of_json
from segmentlog.schemas.registry_errors import registration_problem
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from segmentlog.http.rest.rest_request import Call

FORMATS: Final = {content_type: name for name, content_type in media_types.V2_EMBEDDED.items()}
BODIES: Final = {
    media_types.V2_EMBEDDED["binary"]: BinaryRecords,
    media_types.V2_EMBEDDED["json"]: JsonRecords,
    media_types.V2_EMBEDDED["avro"]: SchemaRecords,
    media_types.V2_EMBEDDED["jsonschema"]: SchemaRecords,
    media_types.V2_EMBEDDED["protobuf"]: SchemaRecords,
}
_WITHOUT_SCHEMA: Final = frozenset((media_types.V2_EMBEDDED["binary"], media_types.V2_EMBEDDED["json"]))
_QUICK_BYTES: Final = 128 << 10
"""Of a body that is seen to without a thread: about a millisecond."""
_as_document = msgspec.json.Decoder().decode


async def produce(call: Call) -> Reply:
    """Append, and tell the offset of each record, or why it has none."""
    topic = check_topic_name(call.path["topic"])
    call.check_topic(Operation.WRITE, topic)
    call.store.check_writable("append")
    body = await call.body.whole()
    ack: AckName | None = call.query.ack
    partition: int | None = call.path.get("partition")
    is_small = len(body) <= _QUICK_BYTES and call.content_type in _WITHOUT_SCHEMA
    if is_small and call.rest.appending.is_quick(topic, ack):
        answer = _produce(call, topic, partition, ack, body)
    else:
        answer = await call.append(_produce_and_note, call, topic, partition, ack, body)
    return Reply(answer, content_type=call.media)


def _produce_and_note(call: Call, topic: str, partition: int | None, ack: AckName | None, body: bytes) -> bytes:
    answer = _produce(call, topic, partition, ack, body)
    call.rest.appending.note_opened(topic)
    return answer


def _produce(call: Call, topic: str, partition: int | None, ack: AckName | None, body: bytes) -> bytes:
    request = call.decode(body)
    key_schema_id = value_schema_id = None
    if isinstance(request, JsonRecords):
        records = _json_records(request.records)
    elif isinstance(request, BinaryRecords):
        found = request.records
        records = Records([one.value for one in found], [one.key for one in found])
    else:
        records, key_schema_id, value_schema_id = _schema_records(call, topic, request)
    given = [one.partition for one in request.records]
    if partition is None and given.count(None) != len(given):
        records.partitions = given
    placed = call.rest.appending.append(topic, records, ack, partition)
    return render(placed, key_schema_id, value_schema_id, call.site.told)


def _json_records(found: Sequence[JsonRecord]) -> Records:
    keys = _column([one.key for one in found])
    return Records(_column([one.value for one in found]) or [None] * len(found), keys)


def _column(raws: list[Raw]) -> list[bytes | None] | None:
    """What is appended; None where nothing was given, as for most keys."""
    if raws.count(ABSENT) == len(raws):
        return None
    if ABSENT in raws:
        return [None if raw is ABSENT else bytes_of_json(raw) for raw in raws]
    texts = list(map(bytes, raws))
    return [None if text == NULL else text for text in texts] if NULL in texts else list(texts)


def _schema_records(call: Call, topic: str, request: SchemaRecords) -> tuple[Records, int | None, int | None]:
    """Encoded by their schemas, and the ids of these."""
    schemas = call.rest.schemas
    name = FORMATS[call.content_type]

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
                422, f"the request has {what}s, and no {what}_schema or {what}_schema_id", error_code=code
            )
        return schemas.writer(topic, SchemaWish(format=name, schema_id=schema_id, schema=schema), is_key=is_key)

    keys = [NULL if one.key is ABSENT else bytes(one.key) for one in request.records]
    values = [NULL if one.value is ABSENT else bytes(one.value) for one in request.records]
    if request.key_schema is not None or request.value_schema is not None:
        call.check_topic(Operation.WRITE, SCHEMAS_TOPIC)
    if request.key_schema_id is not None or request.value_schema_id is not None:
        call.check_schemas()
    try:
        key_writer = column(keys, request.key_schema_id, request.key_schema, True)
        value_writer = column(values, request.value_schema_id, request.value_schema, False)
    except (ValueError, LookupError) as error:
        message = registration_problem(error, may_see=call.may_see(Thing.SCHEMAS))
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, message, error_code=rest_error_codes.INVALID_SCHEMA
        ) from None
    return (
        Records(_encoded(value_writer, values), None if key_writer is None else _encoded(key_writer, keys)),
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


# ---------------------------------------------------------------- the answer


def render(
    placed: Placed, key_schema_id: int | None, value_schema_id: int | None, told: Callable[[str], str] = str
) -> bytes:
    """As JSON. Of records that lie one behind the other by joining their numbers: a tenth of what encoding takes."""
    schema_ids = b'],"key_schema_id":%b,"value_schema_id":%b}' % (
        encode_json(key_schema_id), encode_json(value_schema_id),
    )  # fmt: skip
    if len(placed.parts) == 1 and not placed.errors:
        partition, base_offset, _ = placed.parts[0]
        begin, end = f'{{"partition":{partition},"offset":', ',"error_code":null,"error":null}'
        numbers = map(str, range(base_offset, base_offset + placed.count))
        return b'{"offsets":[' + f"{begin}{f'{end},{begin}'.join(numbers)}{end}".encode() + schema_ids
    lines = [
        b'{"partition":%d,"offset":%d,"error_code":null,"error":null}' % (partition, offset)
        if error is None
        else encode_json(
            {
                "partition": None,
                "offset": None,
                "error_code": rest_error_codes.record_code(error),
                "error": told(words_of(error)),
            }
        )
        for partition, offset, error in placed.outcomes()
    ]
    return b'{"offsets":[' + b",".join(lines) + schema_ids
