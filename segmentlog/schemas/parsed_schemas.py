"""Parsed schemas of a registry, with their references, and the rules for when two texts are the same schema."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, Final

import msgspec

from segmentlog.schemas.compatibility import Earlier
from segmentlog.schemas.registry_errors import InvalidSchema, MissingPackage
from segmentlog.schemas.registry_records import AVRO, Reference, SchemaRecord
from segmentlog.schemas.registry_state import RegistryState
from segmentlog.schemas.schema_kind import Dependency, ParsedSchema
from segmentlog.schemas.schema_parsing import parse
from segmentlog.schemas.subject_names import context_of, resolve_subject

logger = logging.getLogger("segmentlog")

_KEPT_CHARACTERS: Final = 4 << 20
"""Maximum total length of the texts whose parsed schemas are cached."""
_DEPTH_MAX: Final = 100
LATEST: Final = -1


class Draft(msgspec.Struct, frozen=True):
    """A schema to register or look up. ``id`` and ``version`` are for imports; -1 and 0 mean that none is given."""

    schema: str
    schema_type: str = AVRO
    references: tuple[Reference, ...] = ()
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = None
    id: int = -1
    version: int = 0


Identity = tuple[str, ...]
_Key = tuple[str, str, tuple[Dependency, ...]]


class Library:
    """Cache of the parsed schemas of one registry. The caller must hold the lock of the `SchemaJournal`."""

    def __init__(self) -> None:
        self._parsed: OrderedDict[_Key, ParsedSchema] = OrderedDict()
        self._characters = 0
        self._ids: dict[str, dict[Identity, int]] = {}
        self._identities: dict[tuple[str, int], tuple[SchemaRecord, Identity]] = {}

    def parse(self, state: RegistryState, subject: str, draft: Draft | SchemaRecord) -> ParsedSchema:
        """Parse a schema of a subject. Raises `InvalidSchema`, `MissingPackage`."""
        dependencies = tuple(self._dependencies(state, subject, draft.references, {}, 0).values())
        key = (draft.schema_type, draft.schema, dependencies)
        found = self._parsed.get(key)
        if found is None:
            found = self._parsed[key] = parse(draft.schema_type, draft.schema, dependencies)
            self._characters += _characters(key)
            while self._characters > _KEPT_CHARACTERS and len(self._parsed) > 1:
                self._characters -= _characters(self._parsed.popitem(last=False)[0])
        return found

    def _dependencies(
        self, state: RegistryState, subject: str, references: tuple[Reference, ...], found: dict[str, Dependency],
        depth: int,
    ) -> dict[str, Dependency]:  # fmt: skip
        """Collect referenced schemas by name, each after the schemas that it refers to itself."""
        if depth > _DEPTH_MAX:
            raise InvalidSchema("Invalid schema: its references form a cycle, or are nested too deeply")
        for reference in references:
            place = self.resolve(state, subject, reference)
            if reference.name not in found:
                record = state.record(place)
                self._dependencies(state, place[0], record.references, found, depth + 1)
                found[reference.name] = Dependency(reference.name, record.schema)
        return found

    @staticmethod
    def resolve(state: RegistryState, subject: str, reference: Reference) -> tuple[str, int]:
        """Return the (subject, version) that a reference means. Raises `InvalidSchema` if it does not exist."""
        referenced = resolve_subject(reference.subject, subject)
        version = reference.version
        if version == LATEST:
            version = max((one.version for one in state.versions(referenced)), default=LATEST)
        if version not in state.subjects.get(referenced, {}):
            raise InvalidSchema(
                f"Invalid schema: no schema reference found for subject '{referenced}' and version {reference.version}"
            )
        return referenced, version

    def earlier(self, state: RegistryState, record: SchemaRecord) -> Earlier:
        """Return a version as an `Earlier`, the form that `incompatibilities` takes."""
        return Earlier(
            record.version, record.schema, record.schema_type, lambda: self.parse(state, record.subject, record)
        )

    # ------------------------------------------------------------ identity of schemas

    def identity(self, state: RegistryState, subject: str, draft: Draft | SchemaRecord) -> Identity:
        """Return the identity of a schema. Two texts of the same schema have equal identities.

        Raises `InvalidSchema`, `MissingPackage`.
        """
        return identity_of(self.parse(state, subject, draft).canonical, draft)

    def identity_of_stored(self, state: RegistryState, record: SchemaRecord) -> Identity:
        """Return the identity of a registered schema, also if this process cannot parse it.

        Another registry may have stored a text that is not canonical, so the text is parsed first. If this process
        cannot parse the text, the text itself is the identity.
        """
        key = (context_of(record.subject), record.id)
        known = self._identities.get(key)
        if known is not None and known[0].schema is record.schema and known[0].references == record.references:
            return known[1]
        try:
            found = self.identity(state, record.subject, record)
        except (InvalidSchema, MissingPackage) as error:
            logger.debug("schema registry: cannot parse schema %d of subject %s: %s", record.id, record.subject, error)
            found = identity_of(record.schema, record)
        self._identities[key] = (record, found)
        return found

    def find_id(self, state: RegistryState, context: str, identity: Identity) -> int | None:
        """Return the id of a schema in a context, or None."""
        known = self._ids.setdefault(context, {})
        found = known.get(identity)
        if found is None or not self._has_identity(state, context, found, identity):
            known.clear()
            for record in state.distinct(context):
                known.setdefault(self.identity_of_stored(state, record), record.id)
            found = known.get(identity)
        return found

    def _has_identity(self, state: RegistryState, context: str, schema_id: int, identity: Identity) -> bool:
        holders = state.holders(context, schema_id)
        return bool(holders) and self.identity_of_stored(state, holders[0]) == identity

    def find_version(
        self, state: RegistryState, subject: str, identity: Identity, *, deleted: bool = False
    ) -> SchemaRecord | None:
        """Return the latest version of a subject that has this schema, or None."""
        for record in reversed(state.versions(subject, deleted=deleted)):
            if self.identity_of_stored(state, record) == identity:
                return record
        return None


def _characters(key: _Key) -> int:
    """Return the total length of a schema and of the schemas that it refers to."""
    return len(key[1]) + sum(len(one.text) for one in key[2])


def identity_of(canonical: str, draft: Draft | SchemaRecord) -> Identity:
    """Return the identity of a schema: its type, canonical text, references, metadata and rules."""
    references = sorted((one.name, one.subject, one.version) for one in draft.references)
    more = [references, draft.metadata or None, draft.rule_set or None]
    return draft.schema_type, canonical, msgspec.json.encode(more, order="sorted").decode()
