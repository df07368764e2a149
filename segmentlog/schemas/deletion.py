"""Records that delete versions and subjects: first softly, then permanently."""

from __future__ import annotations

import msgspec

from segmentlog.schemas.parsed_schemas import LATEST
from segmentlog.schemas.registry_errors import (
    NotPermitted,
    ReferenceExists,
    SubjectNotSoftDeleted,
    SubjectSoftDeleted,
    UnknownSubject,
    UnknownVersion,
    VersionNotSoftDeleted,
    VersionSoftDeleted,
)
from segmentlog.schemas.registry_records import Pairs, encode_key, encode_object, encode_schema, encode_schema_key
from segmentlog.schemas.registry_state import RegistryState
from segmentlog.schemas.subject_names import is_whole_context


def build_subject_deletion(state: RegistryState, subject: str, *, permanent: bool) -> tuple[list[int], Pairs]:
    """Return the numbers of the versions to delete, and the records that delete them."""
    all_versions = state.versions(subject, deleted=True)
    if not all_versions:
        raise UnknownSubject(subject)
    to_delete = all_versions if permanent else state.versions(subject)
    if not to_delete:
        raise SubjectSoftDeleted(subject)
    for record in to_delete:
        referrers = state.referred_by((subject, record.version), deleted=permanent)
        if any(referrer.subject != subject for referrer in referrers):
            raise ReferenceExists(subject, record.version)
        if permanent and not record.deleted:
            raise SubjectNotSoftDeleted(subject)
    versions = [record.version for record in to_delete]
    if not permanent:
        value = encode_object(subject, {"version": versions[-1]})
        return versions, [(encode_key("DELETE_SUBJECT", subject), value)]
    # Delete the last version first: a process that reads half of the records finds every referenced version.
    return versions, [
        (encode_schema_key(subject, version), None) for version in reversed(versions)
    ] + _build_settings_deletion(state, subject)


def build_version_deletion(state: RegistryState, subject: str, number: int, *, permanent: bool) -> tuple[int, Pairs]:
    """Return the number of the version to delete, and the records that delete it."""
    all_versions = state.versions(subject, deleted=True)
    if not all_versions:
        raise UnknownSubject(subject)
    if number == LATEST:
        alive = state.versions(subject)
        if not alive:
            raise UnknownSubject(subject)
        record = alive[-1]
    else:
        found = [record for record in all_versions if record.version == number]
        if not found:
            raise UnknownVersion(number)
        record = found[0]
    if record.deleted and not permanent:
        raise VersionSoftDeleted(subject, record.version)
    if not record.deleted and permanent:
        raise VersionNotSoftDeleted(subject, record.version)
    if state.referred_by((subject, record.version), deleted=permanent):
        raise ReferenceExists(subject, record.version)
    key = encode_schema_key(subject, record.version)
    if not permanent:
        return record.version, [(key, encode_schema(msgspec.structs.replace(record, deleted=True)))]
    more = _build_settings_deletion(state, subject) if len(all_versions) == 1 else []
    return record.version, [(key, None), *more]


def _build_settings_deletion(state: RegistryState, subject: str) -> list[tuple[bytes, bytes | None]]:
    """Return the records that delete a subject's settings, for a subject whose last version is deleted."""
    return [
        (encode_key(keytype, subject), None)
        for keytype, settings in (("MODE", state.modes), ("CONFIG", state.configs))
        if subject in settings
    ]


def build_import_cleanup(state: RegistryState, scope: str | None) -> list[tuple[bytes, bytes | None]]:
    """Return the records that permanently delete every soft-deleted version in a scope, before an import.

    Raises `NotPermitted` if the scope has versions that are not soft-deleted, and `ReferenceExists` if a schema
    outside of the scope refers to one of its versions.
    """
    if scope is None:
        subjects = list(state.subjects)
    elif is_whole_context(scope):
        subjects = [subject for subject in state.subjects if subject.startswith(scope)]
    else:
        subjects = [scope] if scope in state.subjects else []
    pairs: list[tuple[bytes, bytes | None]] = []
    for subject in subjects:
        for record in reversed(state.versions(subject, deleted=True)):
            if not record.deleted:
                raise NotPermitted("Cannot import since found existing subjects")
            referrers = state.referred_by((subject, record.version), deleted=True)
            if any(referrer.subject not in subjects for referrer in referrers):
                raise ReferenceExists(subject, record.version)
            pairs.append((encode_schema_key(subject, record.version), None))
    if pairs:
        pairs.append((encode_key("CLEAR_SUBJECT", scope), encode_object(scope, {})))
    return pairs
