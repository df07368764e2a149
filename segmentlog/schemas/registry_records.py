"""The records of topic ``_schemas``, in the format of Confluent's registry: JSON keys, JSON values.

    {"keytype":"SCHEMA","subject":"s","version":1,"magic":1}   {"subject":"s","version":1,"id":1,"schemaType":"JSON",
                                                                "references":[..],"schema":"..","deleted":false}
    {"keytype":"CONFIG","subject":"s","magic":0}               {"subject":"s","compatibilityLevel":"FULL", ..}
    {"keytype":"MODE","subject":"s","magic":0}                 {"subject":"s","mode":"READONLY"}
    {"keytype":"DELETE_SUBJECT","subject":"s","magic":0}       {"subject":"s","version":2}: soft-delete versions up to 2
    {"keytype":"CLEAR_SUBJECT","subject":"s","magic":0}        {"subject":"s"}: no version remains
    {"keytype":"CONTEXT","tenant":"default","context":".c","magic":0}
    {"keytype":"NOOP","magic":0}                               no content: a registry became the leader

CONFIG and MODE without a subject, or with null, are global. A null value deletes the setting of its key; for a SCHEMA
key it deletes the version permanently. Avro schemas have no ``schemaType``. Keys of other types are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

SchemaType = Literal["AVRO", "JSON", "PROTOBUF"]
AVRO: Final = "AVRO"
KNOWN_KEYS: Final = frozenset({"SCHEMA", "CONFIG", "MODE", "DELETE_SUBJECT", "CLEAR_SUBJECT"})
_MAGIC_MAX: Final = 1


class Reference(msgspec.Struct, frozen=True):
    """A reference of a schema to another schema: the name in the schema's text, and the version registered for it."""

    name: str
    subject: str
    version: int


class Key(NamedTuple):
    """Decoded key of a record that the registry applies."""

    keytype: str
    subject: str | None
    version: int


class SchemaRecord(msgspec.Struct, frozen=True):
    """One version of a subject: the value of a SCHEMA key."""

    subject: str
    version: int
    id: int
    schema: str
    schema_type: str = msgspec.field(default=AVRO, name="schemaType")
    references: tuple[Reference, ...] = ()
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = msgspec.field(default=None, name="ruleSet")
    deleted: bool = False


class _RawKey(msgspec.Struct):
    keytype: str = ""
    subject: str | None = None
    version: int = 0
    magic: int = 0


class _RawSchema(msgspec.Struct):
    subject: str
    version: int
    id: int
    schema: str
    schema_type: str | None = msgspec.field(default=None, name="schemaType")
    references: list[Reference] | None = None
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = msgspec.field(default=None, name="ruleSet")
    deleted: bool | None = None


_keys = msgspec.json.Decoder(_RawKey)
_schemas = msgspec.json.Decoder(_RawSchema)
_objects = msgspec.json.Decoder(dict[str, Any])


def decode_key(key: bytes | None) -> Key | None:
    """Decode a key; return None for a type that the registry ignores. Raises ValueError for a malformed key."""
    if key is None:
        raise ValueError("the key is null")
    raw = _keys.decode(key)
    if raw.keytype not in KNOWN_KEYS:
        return None
    if raw.keytype == "SCHEMA":
        if not raw.subject or raw.version < 1 or not 0 <= raw.magic <= _MAGIC_MAX:
            raise ValueError("a SCHEMA key must have a subject, a version of at least 1, and magic 0 or 1")
    elif raw.keytype == "DELETE_SUBJECT" and not raw.subject:
        raise ValueError("the key must name the subject to delete")
    return Key(raw.keytype, raw.subject, raw.version)


def decode_schema(value: bytes) -> SchemaRecord:
    """Decode the value of a SCHEMA key. Raises ValueError."""
    raw = _schemas.decode(value)
    if raw.id < 0:
        raise ValueError(f"{raw.id} is not a valid schema id")
    return SchemaRecord(
        raw.subject, raw.version, raw.id, raw.schema, raw.schema_type or AVRO, tuple(raw.references or ()),
        raw.metadata, raw.rule_set, bool(raw.deleted),
    )  # fmt: skip


def decode_object(value: bytes) -> dict[str, Any]:
    """Decode the value of any key except SCHEMA. Raises ValueError."""
    return _objects.decode(value)


def encode_schema_key(subject: str, version: int) -> bytes:
    return _encode({"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1})


def encode_key(keytype: str, subject: str | None) -> bytes:
    """Encode a key of any type except SCHEMA, whose keys also have a version."""
    if subject is None:
        return _encode({"keytype": keytype, "magic": 0})
    return _encode({"keytype": keytype, "subject": subject, "magic": 0})


def encode_context(context: str) -> tuple[bytes, bytes]:
    """Return the key and value that declare a context; Confluent's registry lists contexts by these records."""
    return (
        _encode({"keytype": "CONTEXT", "tenant": "default", "context": context, "magic": 0}),
        _encode({"tenant": "default", "context": context}),
    )


def encode_schema(record: SchemaRecord) -> bytes:
    fields: dict[str, Any] = {"subject": record.subject, "version": record.version, "id": record.id}
    if record.schema_type != AVRO:
        fields["schemaType"] = record.schema_type
    if record.references:
        fields["references"] = record.references
    if record.metadata:
        fields["metadata"] = record.metadata
    if record.rule_set:
        fields["ruleSet"] = record.rule_set
    return _encode(fields | {"schema": record.schema, "deleted": record.deleted})


def encode_object(subject: str | None, fields: Mapping[str, Any]) -> bytes:
    """Encode a value, with its subject if it has one."""
    return _encode(({"subject": subject} if subject is not None else {}) | dict(fields))


def _encode(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(fields)


Pairs = Sequence[tuple[bytes, bytes | None]]
"""Keys and values of records to append as one batch."""
