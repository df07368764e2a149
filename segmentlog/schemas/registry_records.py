"""The records of the topic ``_schemas``, as Confluent's registry keeps them: JSON keys, JSON values.

    {"keytype":"SCHEMA","subject":"s","version":1,"magic":1}   {"subject":"s","version":1,"id":1,"schemaType":"JSON",
                                                                "references":[..],"schema":"..","deleted":false}
    {"keytype":"CONFIG","subject":"s","magic":0}               {"subject":"s","compatibilityLevel":"FULL", ..}
    {"keytype":"MODE","subject":"s","magic":0}                 {"subject":"s","mode":"READONLY"}
    {"keytype":"DELETE_SUBJECT","subject":"s","magic":0}       {"subject":"s","version":2}: all up to it, softly
    {"keytype":"CLEAR_SUBJECT","subject":"s","magic":0}        {"subject":"s"}: of nothing that is left
    {"keytype":"CONTEXT","tenant":"default","context":".c","magic":0}
    {"keytype":"NOOP","magic":0}                               says nothing: a registry that has become the leader

Without a subject, or with null, CONFIG and MODE are for all subjects. A null value takes back what the key said; that
of a SCHEMA deletes the version for good. ``schemaType`` is left out for Avro. Keys of other types are left as they are.
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
    """That a schema uses another one: under what name, and where that is registered."""

    name: str
    subject: str
    version: int


class Key(NamedTuple):
    """A key of one of the types that say something here."""

    keytype: str
    subject: str | None
    version: int


class SchemaRecord(msgspec.Struct, frozen=True):
    """The value under a key of type SCHEMA."""

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
    """What a key says; None for one that says nothing here. Raises ValueError for what is no key at all."""
    if key is None:
        raise ValueError("it is null")
    raw = _keys.decode(key)
    if raw.keytype not in KNOWN_KEYS:
        return None
    if raw.keytype == "SCHEMA":
        if not raw.subject or raw.version < 1 or not 0 <= raw.magic <= _MAGIC_MAX:
            raise ValueError("a schema has a subject, a version from 1 on and magic 0 or 1")
    elif raw.keytype == "DELETE_SUBJECT" and not raw.subject:
        raise ValueError("no subject to be deleted")
    return Key(raw.keytype, raw.subject, raw.version)


def decode_schema(value: bytes) -> SchemaRecord:
    """The value of a SCHEMA key. Raises ValueError."""
    raw = _schemas.decode(value)
    if raw.id < 0:
        raise ValueError(f"{raw.id} is no id")
    return SchemaRecord(
        raw.subject, raw.version, raw.id, raw.schema, raw.schema_type or AVRO, tuple(raw.references or ()),
        raw.metadata, raw.rule_set, bool(raw.deleted),
    )  # fmt: skip


def decode_object(value: bytes) -> dict[str, Any]:
    """Any other value. Raises ValueError."""
    return _objects.decode(value)


def encode_schema_key(subject: str, version: int) -> bytes:
    return _encode({"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1})


def encode_key(keytype: str, subject: str | None) -> bytes:
    """A key of a type that needs no version."""
    if subject is None:
        return _encode({"keytype": keytype, "magic": 0})
    return _encode({"keytype": keytype, "subject": subject, "magic": 0})


def encode_context(context: str) -> tuple[bytes, bytes]:
    """Key and value that say that there is a context: others' registries list them by these."""
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
    """A value that names its subject, where it has one."""
    return _encode(({"subject": subject} if subject is not None else {}) | dict(fields))


def _encode(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(fields)


Pairs = Sequence[tuple[bytes, bytes | None]]
"""Keys and values of records that are to be appended together."""
