"""Read methods of the schema registry of a store."""

from __future__ import annotations

from typing import Any, Final

from segmentlog.schemas import scopes
from segmentlog.schemas.parsed_schemas import LATEST, Draft, Identity, Library
from segmentlog.schemas.registry_errors import (
    InvalidSchemaVersion,
    SchemaNotRegistered,
    UnknownSchema,
    UnknownSubject,
    UnknownVersion,
)
from segmentlog.schemas.registry_records import SchemaRecord
from segmentlog.schemas.registry_state import RegistryState
from segmentlog.schemas.schema_kind import TYPES, ParsedSchema
from segmentlog.schemas.schemas_topic import SchemaJournal
from segmentlog.schemas.subject_names import DEFAULT_CONTEXT, check_subject, context_of, resolve_subject

VERSION_MAX: Final = (1 << 31) - 1


class RegistryReads:
    """The methods of a registry that read. Thread-safe."""

    def __init__(self, journal: SchemaJournal) -> None:
        self._journal = journal
        self._library = Library()

    @staticmethod
    def types() -> list[str]:
        """Return the schema types: AVRO, JSON, PROTOBUF."""
        return list(TYPES)

    def contexts(self) -> list[str]:
        """Return the names of the contexts that have subjects; the default context is ``.``."""
        with self._journal.reading() as state:
            return state.contexts()

    def subjects(self, prefix: str = ":*:", *, deleted: bool = False, only_deleted: bool = False) -> list[str]:
        """Return the names of subjects with a prefix, by default of all contexts.

        ``deleted`` includes soft-deleted subjects, ``only_deleted`` returns only those.
        """
        with self._journal.reading() as state:
            return state.subjects_like(prefix, deleted=deleted, only_deleted=only_deleted)

    def versions(self, subject: str, *, deleted: bool = False, only_deleted: bool = False) -> list[int]:
        """Return the version numbers of a subject. Raises `UnknownSubject`.

        ``deleted`` includes soft-deleted versions, ``only_deleted`` returns only those.
        """
        subject = check_subject(subject)
        with self._journal.reading() as state:
            found = state.versions(subject, deleted=deleted or only_deleted)
            if not found:
                raise UnknownSubject(subject)
            return [record.version for record in found if record.deleted or not only_deleted]

    def schemas(self, prefix: str = ":*:", *, deleted: bool = False, latest_only: bool = False) -> list[SchemaRecord]:
        """Return every version of every subject with a prefix; ``latest_only`` returns only the latest of each."""
        with self._journal.reading() as state:
            found: list[SchemaRecord] = []
            for subject in state.subjects_like(prefix, deleted=deleted, only_deleted=False):
                versions = state.versions(subject, deleted=deleted)
                found += versions[-1:] if latest_only else versions
            return found

    def version(self, subject: str, version: int | str = "latest", *, deleted: bool = False) -> SchemaRecord:
        """Return one version of a subject. Raises `UnknownSubject`, `UnknownVersion`, `InvalidSchemaVersion`."""
        subject, number = check_subject(subject), check_version(version)
        with self._journal.reading() as state:
            return self._version(state, subject, number, deleted=deleted)

    @staticmethod
    def _version(state: RegistryState, subject: str, number: int, *, deleted: bool) -> SchemaRecord:
        versions = state.versions(subject, deleted=deleted)
        if not versions:
            raise UnknownSubject(subject)
        if number == LATEST:
            return versions[-1]
        for record in versions:
            if record.version == number:
                return record
        raise UnknownVersion(number)

    def by_id(self, schema_id: int, subject: str | None = None) -> SchemaRecord:
        """Return the schema with an id, even if it is soft-deleted. Raises `UnknownSchema`.

        The id belongs to the context of ``subject``, or to the default context without ``subject``.
        """
        with self._journal.reading() as state:
            return self._holders(state, schema_id, subject)[0]

    def holders(self, schema_id: int, subject: str | None = None, *, deleted: bool = False) -> list[SchemaRecord]:
        """Return the versions that have an id, sorted by subject and version. Raises `UnknownSchema`."""
        with self._journal.reading() as state:
            found = self._holders(state, schema_id, subject)
            return sorted(
                (record for record in found if deleted or not record.deleted),
                key=lambda record: (record.subject, record.version),
            )

    @staticmethod
    def _holders(state: RegistryState, schema_id: int, subject: str | None) -> list[SchemaRecord]:
        contexts = [context_of(subject)] if subject else [DEFAULT_CONTEXT]
        if subject and contexts == [DEFAULT_CONTEXT] and not state.subjects.get(subject):
            # The caller may name a subject without its context: search every context that has the subject.
            contexts += [one for one in state.contexts() if resolve_subject(subject, f":{one}:") in state.subjects]
        for context in contexts:
            if found := state.holders(context, schema_id):
                return found
        raise UnknownSchema(schema_id)

    def highest_id(self, context: str = DEFAULT_CONTEXT) -> int:
        """Return the highest id that a schema of a context has or had, or 0."""
        with self._journal.reading() as state:
            return state.highest.get(context, 0)

    def referenced_by(self, subject: str, version: int | str, *, deleted: bool = False) -> list[int]:
        """Return the ids of the schemas that refer to a version."""
        subject, number = check_subject(subject), check_version(version)
        with self._journal.reading() as state:
            record = self._version(state, subject, number, deleted=True)
            found = state.referred_by((subject, record.version), deleted=deleted)
            return sorted({one.id for one in found})

    def parsed(self, record: SchemaRecord) -> ParsedSchema:
        """Parse a registered schema and its references. Raises `InvalidSchema`, `MissingPackage`."""
        with self._journal.reading() as state:
            return self._library.parse(state, record.subject, record)

    def parsed_draft(self, subject: str, draft: Draft) -> ParsedSchema:
        """Parse a schema that may be unregistered, and its references. Raises `InvalidSchema`, `MissingPackage`."""
        with self._journal.reading() as state:
            return self._library.parse(state, check_subject(subject), draft)

    def lookup(self, subject: str, draft: Draft, *, normalize: bool = False, deleted: bool = False) -> SchemaRecord:
        """Return the version of a subject that has this schema. Raises `UnknownSubject`, `SchemaNotRegistered`."""
        subject = check_subject(subject)
        with self._journal.reading() as state:
            identity, _ = self._canonical(state, subject, draft, normalize=normalize)
            found = self._library.find_version(state, subject, identity, deleted=deleted)
            if found is not None:
                return found
            if not state.versions(subject, deleted=deleted):
                raise UnknownSubject(subject)
            raise SchemaNotRegistered(subject)

    def _pinned(self, state: RegistryState, subject: str, draft: Draft) -> Any:
        """Return the references of a draft, with "latest" replaced by the current version number."""
        return tuple(
            reference
            if reference.version != LATEST
            else type(reference)(reference.name, reference.subject, self._library.resolve(state, subject, reference)[1])
            for reference in draft.references
        )

    def _canonical(self, state: RegistryState, subject: str, draft: Draft, *, normalize: bool) -> tuple[Identity, str]:
        """Return (the schema's identity, the text to store)."""
        parsed = self._library.parse(state, subject, draft)
        text = parsed.canonical
        if normalize or scopes.setting_of(state, subject, "normalize"):
            text = parsed.normalized()
        pinned = Draft(text, draft.schema_type, self._pinned(state, subject, draft), draft.metadata, draft.rule_set)
        return self._library.identity(state, subject, pinned), text


def check_version(version: object) -> int:
    """Return the number of a version; `LATEST` for ``latest`` and -1. Raises `InvalidSchemaVersion`."""
    if version in ("latest", LATEST, "-1"):
        return LATEST
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) <= 10:
        version = int(version)
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise InvalidSchemaVersion(version)
    return version
