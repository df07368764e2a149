"""Find the subject of a topic's values, and the schema with which a serializer writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from segmentlog.errors import InvalidConfig
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_records import SchemaRecord
from segmentlog.schemas.schema_kind import ParsedSchema
from segmentlog.storage import fork_safety

Strategy = Literal["topic", "record", "topic-record"]
"""``topic``: the subject is "clicks-value", one schema per topic; ``record``: the record's name; ``topic-record``: both
names."""
STRATEGIES: Final = ("topic", "record", "topic-record")


class SchemaSource(Protocol):
    """The methods of a registry that serializers use: `SchemaRegistry` of a store, or `RemoteRegistry` over HTTP."""

    def by_id(self, schema_id: int, subject: str | None = None) -> SchemaRecord: ...

    def version(self, subject: str, version: int | str = "latest") -> SchemaRecord: ...

    def register(self, subject: str, draft: Draft, *, normalize: bool = False) -> SchemaRecord: ...

    def lookup(self, subject: str, draft: Draft, *, normalize: bool = False) -> SchemaRecord: ...

    def parsed(self, record: SchemaRecord) -> ParsedSchema: ...

    def parsed_draft(self, subject: str, draft: Draft) -> ParsedSchema: ...


class WriterOptions(NamedTuple):
    """Options of a serializer that choose its schema."""

    is_key: bool
    strategy: Strategy
    auto_register: bool
    use_latest_version: bool
    normalize: bool

    def check(self, has_schema: bool) -> None:
        """Raise `InvalidConfig` for options that contradict each other."""
        if self.strategy not in STRATEGIES:
            raise InvalidConfig("subject_name_strategy", self.strategy, ", ".join(map(repr, STRATEGIES)))
        if self.use_latest_version and self.auto_register:
            raise InvalidConfig("use_latest_version", True, "use False, or also auto_register=False")
        if not has_schema and not self.use_latest_version:
            raise InvalidConfig("schema", None, "give a schema, or use_latest_version=True for the registered schema")
        if not has_schema and self.strategy != "topic":
            raise InvalidConfig("subject_name_strategy", self.strategy, "use 'topic' without a schema")


class Writers:
    """Cache of the schema that a serializer writes with, for each subject. Thread-safe."""

    def __init__(self, source: SchemaSource, options: WriterOptions) -> None:
        self._source = source
        self._options = options
        self._found: dict[str, SchemaRecord] = {}
        self._mutex = fork_safety.lock(self, "_mutex")

    def subject(self, topic: str, record_name: str) -> str:
        """Return the subject of a topic's values, or of its keys."""
        match self._options.strategy:
            case "record":
                return record_name
            case "topic-record":
                return f"{topic}-{record_name}"
            case _:
                return f"{topic}-{'key' if self._options.is_key else 'value'}"

    def find(self, topic: str, record_name: str, make_draft: Callable[[str], Draft | None]) -> SchemaRecord:
        """Return the schema of a topic's values; register it first if necessary. Raises the registry's errors."""
        subject = self.subject(topic, record_name)
        found = self._found.get(subject)
        if found is None:
            with self._mutex:
                found = self._found[subject] = self._found.get(subject) or self._find(subject, make_draft(subject))
        return found

    def _find(self, subject: str, draft: Draft | None) -> SchemaRecord:
        options = self._options
        if options.use_latest_version or draft is None:
            return self._source.version(subject, "latest")
        if options.auto_register:
            return self._source.register(subject, draft, normalize=options.normalize)
        return self._source.lookup(subject, draft, normalize=options.normalize)
