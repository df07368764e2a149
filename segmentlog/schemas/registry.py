"""The schema registry of a store: the operations of Confluent's registry, as methods.

This module registers and deletes schemas and changes settings. `registry_lookups` reads, `deletion` builds the records
that a deletion appends, and `scopes` finds the settings that apply to a subject. `schemas_topic` reads and writes the
topic that stores all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from segmentlog.schemas import deletion, scopes
from segmentlog.schemas.compatibility import check_level, incompatibilities
from segmentlog.schemas.parsed_schemas import LATEST, Draft, Identity
from segmentlog.schemas.registry_errors import (
    IdDoesNotMatch,
    IncompatibleSchema,
    InvalidSchema,
    NoSubjectConfig,
    NoSubjectMode,
    NotPermitted,
    UnknownSubject,
    UnknownVersion,
)
from segmentlog.schemas.registry_lookups import VERSION_MAX, RegistryReads, check_version
from segmentlog.schemas.registry_records import (
    Pairs,
    SchemaRecord,
    encode_context,
    encode_key,
    encode_object,
    encode_schema,
    encode_schema_key,
)
from segmentlog.schemas.registry_state import RegistryState
from segmentlog.schemas.schemas_topic import ID_MAX, SchemaJournal
from segmentlog.schemas.subject_names import check_scope, check_subject, context_of
from segmentlog.topics.topic_registry import Topics

_SETTINGS: Final[Mapping[str, type]] = {
    "alias": str,
    "aliasForDeks": str,
    "normalize": bool,
    "validateFields": bool,
    "validateNewSchemas": bool,
    "validateRules": bool,
    "compatibilityLevel": object,
    "compatibilityPolicy": str,
    "compatibilityGroup": str,
    "defaultMetadata": dict,
    "overrideMetadata": dict,
    "defaultRuleSet": dict,
    "overrideRuleSet": dict,
}
"""Settings that a configuration may have, with their types; `check_level` checks the compatibility level.
The registry stores settings that docs/schemas.md does not list, and ignores them."""


class SchemaRegistry(RegistryReads):
    """Subjects, versions and settings of one store. Thread-safe; many processes can use the same store.

    Every change is on disk when the method returns. Methods raise subclasses of `SchemaError`, each with the code of
    Confluent's registry. They also raise `CorruptBatch` if the topic is damaged. Methods that change something raise
    `ReadOnlyStore`, `DiskFull` and the other errors of an append.
    """

    def __init__(self, topics: Topics) -> None:
        super().__init__(SchemaJournal(topics))

    # ------------------------------------------------------------ registering

    def register(self, subject: str, draft: Draft, *, normalize: bool = False, force: bool = False) -> SchemaRecord:
        """Register a schema as the next version of a subject, and return its record.

        If the subject already has the schema, return that version. All subjects of a context share a schema's id.
        ``force`` skips the compatibility check. Raises `InvalidSchema`, `IncompatibleSchema`, `NotPermitted`,
        `SchemaTooLarge`.
        """
        subject = check_subject(subject)
        if not -1 <= draft.id <= ID_MAX or not 0 <= draft.version <= VERSION_MAX:
            raise InvalidSchema(f"Invalid schema: id {draft.id} or version {draft.version} is out of range")
        compared: tuple[Any, ...] | None = None
        if draft.id < 0 and draft.version == 0:
            # Most schemas are registered already: a caller that needs only such a schema does not wait for writers.
            with self._journal.reading() as state:
                identity, _ = self._canonical(state, subject, draft, normalize=normalize)
                found = self._library.find_version(state, subject, identity)
                if found is not None:
                    scopes.check_register_mode(state, subject, draft.id)
                    self._journal.make_durable()
                    return found
                if not force and not draft.references and scopes.mode_of(state, subject) != scopes.IMPORT:
                    # Compare before taking the lock of the store: comparing takes long, and other processes would wait.
                    scopes.check_register_mode(state, subject, draft.id)
                    self._check_compatible(state, subject, draft, state.versions(subject))
                    compared = _comparison_inputs(state, subject)
        with self._journal.writing() as state:
            return self._register(state, subject, draft, normalize=normalize, force=force, compared=compared)

    def _register(
        self, state: RegistryState, subject: str, draft: Draft, *, normalize: bool, force: bool,
        compared: tuple[Any, ...] | None,
    ) -> SchemaRecord:  # fmt: skip
        scopes.check_register_mode(state, subject, draft.id)
        identity, text = self._canonical(state, subject, draft, normalize=normalize)
        context = context_of(subject)
        found = self._library.find_version(state, subject, identity)
        if found is not None and draft.version in (0, found.version) and draft.id in (-1, found.id):
            self._journal.make_durable()
            return found
        is_import = scopes.mode_of(state, subject) == scopes.IMPORT
        everything = state.versions(subject, deleted=True)
        version = 1 + max((record.version for record in everything), default=0)
        if draft.version > 0:
            if draft.version != version and not is_import:
                raise InvalidSchema("Invalid schema: Version is not one more than previous version")
            version = draft.version
        if version > VERSION_MAX:
            raise NotPermitted(
                f"Subject {subject} already has version {VERSION_MAX}, the highest possible; the schema was not"
                " registered. Register it under another subject"
            )
        if not is_import and not force and (compared is None or compared != _comparison_inputs(state, subject)):
            self._check_compatible(state, subject, draft, state.versions(subject))
        schema_id = self._id_of(state, context, identity, draft)
        record = SchemaRecord(
            subject, version, schema_id, text, draft.schema_type, self._pinned(state, subject, draft),
            draft.metadata or None, draft.rule_set or None,
        )  # fmt: skip
        pairs: list[tuple[bytes, bytes | None]] = []
        if context not in state.contexts():
            pairs.append(encode_context(context))
        for old in everything:  # the new version replaces a soft-deleted version with the same schema
            is_same = old.deleted and old.id == schema_id and old.version < version
            if is_same and not state.referred_by((subject, old.version), deleted=True):
                pairs.append((encode_schema_key(subject, old.version), None))
        pairs.append((encode_schema_key(subject, version), encode_schema(record)))
        self._journal.append(pairs)
        return record

    def _id_of(self, state: RegistryState, context: str, identity: Identity, draft: Draft) -> int:
        known = self._library.find_id(state, context, identity)
        if draft.id < 0:
            return self._journal.assign_id(context) if known is None else known
        holders = state.holders(context, draft.id)
        if holders and self._library.identity_of_stored(state, holders[0]) != identity:
            raise IdDoesNotMatch(f"Overwrite new schema with id {draft.id} is not permitted.")
        return draft.id

    # ------------------------------------------------------------ compatibility

    def _check_compatible(
        self, state: RegistryState, subject: str, draft: Draft, earlier: Sequence[SchemaRecord]
    ) -> None:
        if problems := self._problems(state, subject, draft, earlier):
            raise IncompatibleSchema(subject, tuple(problems))

    def _problems(self, state: RegistryState, subject: str, draft: Draft, earlier: Sequence[SchemaRecord]) -> list[str]:
        level = scopes.level_of(state, subject)
        if level == "NONE" or not earlier:
            return []
        new = self._library.parse(state, subject, draft)
        if group := scopes.setting_of(state, subject, "compatibilityGroup"):
            wanted = _property(draft.metadata, group)
            earlier = [record for record in earlier if _property(record.metadata, group) == wanted]
        others = [self._library.earlier(state, record) for record in earlier]
        return incompatibilities(level, new, draft.schema_type, others)

    def check(self, subject: str, draft: Draft, version: int | str | None = None) -> list[str]:
        """Return the reasons why a schema is incompatible with a subject, or with one version of it; empty if none.

        Every schema is compatible with a subject that does not exist. Raises `InvalidSchema`, `UnknownVersion`.
        """
        subject = check_subject(subject)
        with self._journal.reading() as state:
            self._library.parse(state, subject, draft)
            earlier = state.versions(subject)
            if version is not None:
                number = check_version(version)
                if number != LATEST:
                    if number not in {record.version for record in earlier}:
                        raise UnknownVersion(number)
                    earlier = [record for record in earlier if record.version == number]
                earlier = earlier[-1:]
            return self._problems(state, subject, draft, earlier)

    # ------------------------------------------------------------ deleting

    def delete_subject(self, subject: str, *, permanent: bool = False) -> list[int]:
        """Delete all versions of a subject, and return their numbers.

        The deletion is soft by default. ``permanent`` requires that the versions are soft-deleted.
        Raises `UnknownSubject`, `SubjectSoftDeleted`, `SubjectNotSoftDeleted`, `ReferenceExists`, `NotPermitted`.
        """
        subject = check_subject(subject)
        with self._journal.writing() as state:
            scopes.check_writable_mode(state, subject)
            versions, pairs = deletion.build_subject_deletion(state, subject, permanent=permanent)
            self._delete(pairs, permanent=permanent)
            return versions

    def delete_version(self, subject: str, version: int | str, *, permanent: bool = False) -> int:
        """Delete one version of a subject, and return its number; ``permanent`` as in `delete_subject`.

        Raises `UnknownSubject`, `UnknownVersion`, `VersionSoftDeleted`, `VersionNotSoftDeleted`, `ReferenceExists`,
        `NotPermitted`.
        """
        subject, number = check_subject(subject), check_version(version)
        with self._journal.writing() as state:
            scopes.check_writable_mode(state, subject)
            found, pairs = deletion.build_version_deletion(state, subject, number, permanent=permanent)
            self._delete(pairs, permanent=permanent)
            return found

    def _delete(self, pairs: Pairs, *, permanent: bool) -> None:
        if permanent:
            self._journal.store_highest_ids()
        self._journal.append(pairs)

    # ------------------------------------------------------------ settings

    def config(self, subject: str | None = None, *, default_to_global: bool = False) -> Mapping[str, Any]:
        """Return the settings of a subject, or the global settings if ``subject`` is None.

        With ``default_to_global``, include inherited settings. Raises `NoSubjectConfig`.
        """
        subject = None if subject is None else check_scope(subject)
        with self._journal.reading() as state:
            if subject is None or default_to_global:
                return scopes.config_of(state, subject)
            own = state.configs.get(subject)
            if own is None:
                raise NoSubjectConfig(subject)
            return {name: value for name, value in own.items() if name != "subject" and value is not None}

    def set_config(self, subject: str | None, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Change settings of a subject, or global settings if ``subject`` is None; return all of its settings.

        Settings that are not given keep their values; a value of None removes the setting. Raises
        `InvalidCompatibility`, `InvalidSchema` for an unknown setting or a value of the wrong type, `NotPermitted`.
        """
        subject = None if subject is None else check_scope(subject)
        if unknown := sorted(set(settings) - _SETTINGS.keys()):
            raise InvalidSchema(f"Invalid configuration: unknown setting {unknown[0]!r}")
        for name, value in settings.items():
            if value is not None and not isinstance(value, _SETTINGS[name]):
                raise InvalidSchema(f"Invalid configuration: {name} must be {_SETTINGS[name].__name__}, but is"
                                    f" {type(value).__name__}")  # fmt: skip
        changes = dict(settings)
        if changes.get("compatibilityLevel") is not None:
            changes["compatibilityLevel"] = check_level(changes["compatibilityLevel"])
        with self._journal.writing() as state:
            scopes.check_writable_mode(state, subject)
            fields = {**state.configs.get(subject, {}), **changes}
            fields = {name: value for name, value in fields.items() if value is not None and name != "subject"}
            self._journal.append([(encode_key("CONFIG", subject), encode_object(subject, fields))])
            return fields

    def delete_config(self, subject: str | None = None) -> Mapping[str, Any]:
        """Delete all settings of a subject, or the global settings if ``subject`` is None; return the old settings.

        Raises `UnknownSubject`, `NotPermitted`.
        """
        subject = None if subject is None else check_scope(subject)
        with self._journal.writing() as state:
            scopes.check_writable_mode(state, subject)
            own = state.configs.get(subject)
            if own is None and subject is not None:
                raise UnknownSubject(subject)
            if own is not None:
                self._journal.append([(encode_key("CONFIG", subject), None)])
            return {name: value for name, value in (own or {}).items() if name != "subject"}

    def mode(self, subject: str | None = None, *, default_to_global: bool = False) -> str:
        """Return the mode of a subject, or the global mode if ``subject`` is None.

        With ``default_to_global``, return the mode that applies, inherited or its own. Raises `NoSubjectMode`.
        """
        subject = None if subject is None else check_scope(subject)
        with self._journal.reading() as state:
            if subject is None or default_to_global:
                return scopes.mode_of(state, subject)
            if subject not in state.modes:
                raise NoSubjectMode(subject)
            return state.modes[subject]

    def set_mode(self, subject: str | None, mode: object, *, force: bool = False) -> str:
        """Set the mode of a subject, or the global mode if ``subject`` is None, and return it in upper case.

        IMPORT requires a subject without schemas, or ``force``. Raises `InvalidRegistryMode`, `NotPermitted`,
        `ReferenceExists`.
        """
        subject, mode = None if subject is None else check_scope(subject), scopes.check_mode(mode)
        with self._journal.writing() as state:
            pairs: list[tuple[bytes, bytes | None]] = []
            if mode == scopes.IMPORT and scopes.mode_of(state, subject) != scopes.IMPORT and not force:
                pairs += deletion.build_import_cleanup(state, subject)
            if pairs:
                self._journal.store_highest_ids()
            pairs.append((encode_key("MODE", subject), encode_object(subject, {"mode": mode})))
            self._journal.append(pairs)
            return mode

    def delete_mode(self, subject: str | None = None) -> str:
        """Delete the mode of a subject, or the global mode if ``subject`` is None, and return it.

        Raises `UnknownSubject`.
        """
        subject = None if subject is None else check_scope(subject)
        with self._journal.writing() as state:
            own = state.modes.get(subject)
            if own is None and subject is not None:
                raise UnknownSubject(subject)
            if own is not None:
                self._journal.append([(encode_key("MODE", subject), None)])
            return own or scopes.READWRITE


def _comparison_inputs(state: RegistryState, subject: str) -> tuple[Any, ...]:
    """Return everything that a comparison with a new version depends on; while it is equal, so is the result."""
    group = scopes.setting_of(state, subject, "compatibilityGroup")
    return scopes.level_of(state, subject), group, tuple(state.versions(subject))


def _property(metadata: dict[str, Any] | None, name: object) -> Any:
    """Return a property of a schema's metadata, or None.

    ``name`` may have any type: another registry may have stored an invalid ``compatibilityGroup``.
    """
    properties = (metadata or {}).get("properties")
    return properties.get(name) if isinstance(properties, dict) and isinstance(name, str) else None
