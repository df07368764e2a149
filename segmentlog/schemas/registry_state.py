"""Subjects, ids and settings of a registry, built from the records of topic ``_schemas``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from segmentlog.schemas.registry_records import Key, SchemaRecord, decode_key, decode_object, decode_schema
from segmentlog.schemas.subject_names import bare_name, context_of, resolve_subject

logger = logging.getLogger("segmentlog")

Versions = dict[int, SchemaRecord]
Place = tuple[str, int]
"""(subject, version number)"""


class RegistryState:
    """State of the registry after the records that were applied so far. Not thread-safe."""

    def __init__(self) -> None:
        self.subjects: dict[str, Versions] = {}
        """Versions by subject, including soft-deleted versions; permanently deleted subjects are absent."""
        self.ids: dict[str, dict[int, dict[Place, None]]] = {}
        """For each context and id: the versions with that id, in the order of their registration."""
        self.highest: dict[str, int] = {}
        """The highest id ever read in each context, including ids of deleted schemas."""
        self.configs: dict[str | None, dict[str, Any]] = {}
        """Settings by subject; None is the key of the global settings."""
        self.modes: dict[str | None, str] = {}
        self.referrers: dict[Place, dict[Place, None]] = {}

    def apply_record(self, key: bytes | None, value: bytes | None) -> None:
        """Apply the next record of the topic; skip other record types, and log a record that cannot be read."""
        try:
            decoded_key = decode_key(key)
            if decoded_key is not None:
                self._apply(decoded_key, value)
        except (ValueError, msgspec.DecodeError) as error:
            logger.warning(
                "schema registry: skipped a record of topic _schemas with key %r: %s", (key or b"")[:200], error
            )

    def _apply(self, key: Key, value: bytes | None) -> None:
        match key.keytype:
            case "SCHEMA":
                assert key.subject is not None
                self._set_schema((key.subject, key.version), None if value is None else decode_schema(value))
            case "CONFIG":
                if value is None:
                    self.configs.pop(key.subject, None)
                else:
                    self.configs[key.subject] = decode_object(value)
            case "MODE":
                mode = None if value is None else decode_object(value).get("mode")
                if isinstance(mode, str):
                    self.modes[key.subject] = mode
                else:
                    self.modes.pop(key.subject, None)
            case "DELETE_SUBJECT" if value is not None:
                assert key.subject is not None
                until = decode_object(value).get("version")
                for version, record in self.subjects.get(key.subject, {}).items():
                    if isinstance(until, int) and version <= until and not record.deleted:
                        self.subjects[key.subject][version] = msgspec.structs.replace(record, deleted=True)
            case _:
                pass  # CLEAR_SUBJECT: each remaining version has its own tombstone

    def _set_schema(self, place: Place, record: SchemaRecord | None) -> None:
        subject, version = place
        context = context_of(subject)
        ids = self.ids.setdefault(context, {})
        if record is not None:
            if (record.subject, record.version) != place:
                raise ValueError("key and value name different versions")
            self.highest[context] = max(record.id, self.highest.get(context, 0))
            holder = next((self.record(other) for other in ids.get(record.id, {}) if other != place), None)
            if holder is not None and not _have_same_text(holder, record):
                raise ValueError(
                    f"id {record.id} belongs to another schema, version {holder.version} of subject {holder.subject}"
                )
        self._remove_version(place)
        if record is None:
            return
        self.subjects.setdefault(subject, {})[version] = record
        ids.setdefault(record.id, {})[place] = None
        for reference in record.references:
            referenced = (resolve_subject(reference.subject, subject), reference.version)
            self.referrers.setdefault(referenced, {})[place] = None

    def _remove_version(self, place: Place) -> None:
        subject, version = place
        versions = self.subjects.get(subject, {})
        record = versions.pop(version, None)
        if record is None:
            return
        if not versions:
            del self.subjects[subject]
        ids = self.ids[context_of(subject)]
        ids[record.id].pop(place, None)
        if not ids[record.id]:
            del ids[record.id]
        for reference in record.references:
            referenced = (resolve_subject(reference.subject, subject), reference.version)
            self.referrers.get(referenced, {}).pop(place, None)

    # ------------------------------------------------------------ lookups

    def record(self, place: Place) -> SchemaRecord:
        """Return the record of a version, which must exist."""
        return self.subjects[place[0]][place[1]]

    def versions(self, subject: str, *, deleted: bool = False) -> list[SchemaRecord]:
        """Return the versions of a subject, in order; ``deleted`` includes soft-deleted versions."""
        found = self.subjects.get(subject, {})
        return [found[version] for version in sorted(found) if deleted or not found[version].deleted]

    def holders(self, context: str, schema_id: int) -> list[SchemaRecord]:
        """Return the versions that have an id in a context."""
        return [self.record(place) for place in self.ids.get(context, {}).get(schema_id, {})]

    def distinct(self, context: str) -> Iterator[SchemaRecord]:
        """Yield one version of each id of a context, in the order of ids."""
        ids = self.ids.get(context, {})
        for schema_id in sorted(ids):
            yield self.record(next(iter(ids[schema_id])))

    def referred_by(self, place: Place, *, deleted: bool) -> list[SchemaRecord]:
        """Return the versions whose schemas refer to a version; ``deleted`` includes soft-deleted versions."""
        found = [self.record(other) for other in self.referrers.get(place, {})]
        return [record for record in found if deleted or not record.deleted]

    def contexts(self) -> list[str]:
        """Return the names of the contexts that have schemas, and of the default context."""
        return sorted({".", *(context for context, ids in self.ids.items() if ids)})

    def subjects_like(self, prefix: str, *, deleted: bool, only_deleted: bool) -> list[str]:
        """Return the names of subjects with a prefix, sorted.

        After ``:*:`` the prefix matches subjects of all contexts. Without a context it matches the default context.
        """
        in_all_contexts = prefix.startswith(":*:")
        prefix = prefix.removeprefix(":*:")
        found = []
        for subject, versions in self.subjects.items():
            if not (bare_name(subject).startswith(prefix) if in_all_contexts else _has_prefix(subject, prefix)):
                continue
            is_deleted = all(record.deleted for record in versions.values())
            if is_deleted if only_deleted else deleted or not is_deleted:
                found.append(subject)
        return sorted(found)


def _has_prefix(subject: str, prefix: str) -> bool:
    return subject.startswith(prefix) and (prefix.startswith(":") or not subject.startswith(":."))


def _have_same_text(first: SchemaRecord, second: SchemaRecord) -> bool:
    """Return whether two records have the same schema text and type."""
    return (first.schema, first.schema_type) == (second.schema, second.schema_type)
