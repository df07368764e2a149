"""The registry of a store: registration, lookups, comparison, deletion and settings."""

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segmentlog.errors import ReadOnlyStore
from segmentlog.schemas import registry as registry_module
from segmentlog.schemas import registry_errors
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry import SchemaRegistry
from segmentlog.schemas.registry_records import Reference, encode_key, encode_object
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide an empty store."""
    with LogStore(tmp_path / "store", background=False) as opened:
        yield opened


@pytest.fixture
def registry(store: LogStore) -> SchemaRegistry:
    """Provide the store's registry."""
    return store.schemas


def record_of(*fields: dict[str, Any] | str, name: str = "R") -> Draft:
    """Return an Avro record; a field is the name of a string field, or a full field definition."""
    written = [{"name": field, "type": "string"} if isinstance(field, str) else field for field in fields]
    return Draft(json.dumps({"type": "record", "name": name, "fields": written}))


OPTIONAL = {"name": "b", "type": ["null", "string"], "default": None}


def test_one_schema_has_one_id_however_it_is_spelled(registry: SchemaRegistry) -> None:
    """White space, long forms and the subject do not change a schema's id; a different schema gets the next id."""
    first = registry.register("a", Draft('{"type": "string"}'))
    assert registry.register("a", Draft(' "string" ')) == first
    second = registry.register("b", Draft('"string"'))
    assert (second.id, second.version) == (first.id, 1)
    assert registry.register("b", Draft('["null", "string"]')).id == first.id + 1
    assert [(one.subject, one.version) for one in registry.holders(first.id)] == [("a", 1), ("b", 1)]
    assert registry.lookup("a", Draft('{"type":"string"}')).version == 1
    with pytest.raises(registry_errors.SchemaNotRegistered):
        registry.lookup("a", Draft('"int"'))
    with pytest.raises(registry_errors.UnknownSubject):
        registry.lookup("c", Draft('"int"'))


def test_normalized_schemas_are_the_same_in_any_order(registry: SchemaRegistry) -> None:
    """Unordered parts are sorted if the caller or a setting asks for it."""
    one, other = Draft('{"type":"object","title":"x"}', "JSON"), Draft('{"title":"x","type":"object"}', "JSON")
    assert registry.register("a", one, normalize=True) == registry.register("a", other, normalize=True)
    assert registry.register("b", one) != registry.register("b", other)
    registry.set_config("c", {"normalize": True})
    assert registry.register("c", one) == registry.register("c", other)


LEVELS: dict[str, list[Draft]] = {
    # Each schema is compatible with the first two at exactly these levels.
    "NONE": [Draft('"int"')],
    "BACKWARD": [record_of("a", OPTIONAL, {"name": "c", "type": "int", "default": 0})],
    "BACKWARD_TRANSITIVE": [record_of("a", OPTIONAL)],
    "FORWARD": [record_of("a", OPTIONAL, "c")],
    "FORWARD_TRANSITIVE": [record_of("a", OPTIONAL, "c")],
    "FULL": [record_of("a", OPTIONAL)],
    "FULL_TRANSITIVE": [record_of("a", OPTIONAL)],
}


@pytest.mark.parametrize("level", LEVELS)
def test_levels_let_through_what_they_say(registry: SchemaRegistry, level: str) -> None:
    """Each level accepts the schemas that it allows, and refuses all others."""
    registry.set_config(None, {"compatibilityLevel": level.lower()})
    registry.register("s", record_of("a"))
    registry.register("s", record_of("a", OPTIONAL))
    for draft in LEVELS[level]:
        assert registry.check("s", draft) == []
        registry.register("s", draft)
    refused = {"BACKWARD": record_of("a", "new"), "FORWARD": record_of("other"), "FULL": record_of("a", "new")}
    if level != "NONE":
        draft = refused[level.removesuffix("_TRANSITIVE")]
        problems = registry.check("s", draft)
        assert f"{{compatibility: '{level}'}}" in problems
        with pytest.raises(registry_errors.IncompatibleSchema) as told:
            registry.register("s", draft)
        assert pickle.loads(pickle.dumps(told.value)).args == told.value.args
        assert str(told.value) == str(pickle.loads(pickle.dumps(told.value)))


def test_transitive_levels_look_at_every_version(registry: SchemaRegistry) -> None:
    """A default added and removed again is compatible with each previous version, but not with all versions."""
    registry.register("s", record_of("a"))
    registry.register("s", record_of("a", {"name": "b", "type": "string", "default": ""}))
    without_default = record_of("a", "b")
    assert registry.check("s", without_default) == []
    registry.set_config("s", {"compatibilityLevel": "BACKWARD_TRANSITIVE"})
    assert "{oldSchemaVersion: 1}" in registry.check("s", without_default)
    assert registry.check("s", without_default, 2) == []
    assert registry.check("s", without_default, "latest") == []
    with pytest.raises(registry_errors.UnknownVersion):
        registry.check("s", without_default, 7)
    with pytest.raises(registry_errors.IncompatibleSchema):
        registry.register("s", Draft('{"type":"object"}', "JSON"))


def test_deleting_is_soft_and_then_for_good(registry: SchemaRegistry) -> None:
    """Soft-deleted versions are found by id and with ``deleted``; only they can be deleted permanently."""
    first = registry.register("s", record_of("a"))
    registry.register("s", record_of("a", OPTIONAL))
    with pytest.raises(registry_errors.VersionNotSoftDeleted):
        registry.delete_version("s", 1, permanent=True)
    assert registry.delete_version("s", "1") == 1
    with pytest.raises(registry_errors.VersionSoftDeleted):
        registry.delete_version("s", 1)
    assert registry.versions("s") == [2]
    assert registry.versions("s", deleted=True) == [1, 2]
    assert registry.versions("s", only_deleted=True) == [1]
    assert registry.by_id(first.id).schema == first.schema
    assert registry.holders(first.id) == []
    with pytest.raises(registry_errors.SubjectNotSoftDeleted):
        registry.delete_subject("s", permanent=True)
    assert registry.delete_subject("s") == [2]
    with pytest.raises(registry_errors.SubjectSoftDeleted):
        registry.delete_subject("s")
    with pytest.raises(registry_errors.UnknownSubject):
        registry.versions("s")
    assert registry.subjects() == []
    assert registry.subjects(deleted=True) == registry.subjects(only_deleted=True) == ["s"]
    again = registry.register("s", record_of("a"))
    assert (again.id, again.version) == (first.id, 3)
    assert registry.delete_subject("s") == [3]
    assert 3 in registry.delete_subject("s", permanent=True)
    with pytest.raises(registry_errors.UnknownSchema):
        registry.by_id(first.id)
    with pytest.raises(registry_errors.UnknownSubject):
        registry.delete_subject("s", permanent=True)


def test_an_id_is_never_given_again(store: LogStore, tmp_path: Path) -> None:
    """An id is not assigned again after a permanent deletion, a compaction, or the deletion of the topic."""
    given = set()
    for number in range(3):
        record = store.schemas.register("s", Draft(f'{{"type":"fixed","name":"F","size":{number + 1}}}'))
        assert record.id not in given
        given.add(record.id)
        store.schemas.delete_subject("s")
        store.schemas.delete_subject("s", permanent=True)
    log = store.topic("_schemas").partition(0)
    log.roll()
    log.compact()
    with LogStore(store.path, background=False) as other:
        given.add(other.schemas.register("s", Draft('"int"')).id)
        other.delete_topic("_schemas")
        assert other.schemas.subjects(deleted=True) == []
        given.add(other.schemas.register("s", Draft('"int"')).id)
    assert len(given) == 5


def test_references_hold_what_they_refer_to(registry: SchemaRegistry) -> None:
    """A schema is parsed with its references, which cannot be deleted before it."""
    registry.register("page", record_of("path", name="Page"))
    reference = Reference("Page", "page", 1)
    draft = msgspec.structs.replace(record_of({"name": "page", "type": "Page"}), references=(reference,))
    record = registry.register("click", draft)
    assert registry.referenced_by("page", 1) == [record.id]
    assert '"path"' in registry.parsed(record).formatted("resolved")
    with pytest.raises(registry_errors.ReferenceExists):
        registry.delete_subject("page")
    with pytest.raises(registry_errors.InvalidSchema, match="subject 'nothing' and version 1"):
        registry.register("x", msgspec.structs.replace(draft, references=(Reference("Page", "nothing", 1),)))
    latest = registry.register("x", msgspec.structs.replace(draft, references=(Reference("Page", "page", -1),)))
    assert latest.references == (reference,)
    assert latest.id == record.id
    for subject in ("click", "x"):
        registry.delete_subject(subject)
    assert registry.referenced_by("page", 1) == []
    assert registry.referenced_by("page", 1, deleted=True) == [record.id]
    registry.delete_subject("page")
    with pytest.raises(registry_errors.ReferenceExists):  # a soft-deleted version may be restored
        registry.delete_subject("page", permanent=True)


def test_modes_let_in_what_they_say(registry: SchemaRegistry) -> None:
    """READONLY forbids changes, IMPORT requires ids, READWRITE assigns ids; READONLY_OVERRIDE overrides subjects."""
    imported = Draft('"int"', id=77, version=5)
    with pytest.raises(registry_errors.NotPermitted):
        registry.register("s", imported)
    registry.set_mode("s", "import")
    with pytest.raises(registry_errors.NotPermitted):
        registry.register("s", Draft('"int"'))
    assert registry.register("s", imported).version == 5
    with pytest.raises(registry_errors.IdDoesNotMatch):
        registry.register("s", Draft('"long"', id=77))
    registry.set_mode("s", "READWRITE")
    assert registry.register("s", Draft('"long"')).id == 78
    with pytest.raises(registry_errors.NotPermitted):  # existing schemas have ids that an import may contradict
        registry.set_mode("s", "IMPORT")
    assert registry.set_mode("s", "IMPORT", force=True) == "IMPORT"
    registry.set_mode(None, "READONLY_OVERRIDE")
    assert registry.mode("s", default_to_global=True) == "READONLY_OVERRIDE"
    with pytest.raises(registry_errors.NotPermitted):
        registry.delete_subject("s")
    with pytest.raises(registry_errors.NotPermitted):
        registry.set_config("s", {"compatibilityLevel": "NONE"})
    registry.set_mode(None, "READONLY")
    assert registry.mode("s") == "IMPORT"
    with pytest.raises(registry_errors.NotPermitted):
        registry.register("other", Draft('"int"'))
    assert registry.delete_mode("s") == "IMPORT"
    with pytest.raises(registry_errors.NoSubjectMode):
        registry.mode("s")
    assert registry.delete_mode() == "READONLY"
    assert registry.mode() == "READWRITE"
    with pytest.raises(registry_errors.InvalidRegistryMode):
        registry.set_mode(None, "sideways")


def test_settings_apply_from_the_nearest_scope(registry: SchemaRegistry) -> None:
    """A subject has its own setting, else its context's, else the global setting."""
    assert registry.config() == {"compatibilityLevel": "BACKWARD"}
    registry.set_config(None, {"compatibilityLevel": "FULL"})
    registry.set_config(":.c:", {"compatibilityLevel": "NONE"})
    with pytest.raises(registry_errors.NoSubjectConfig):
        registry.config("s")
    assert registry.config("s", default_to_global=True)["compatibilityLevel"] == "FULL"
    assert registry.config(":.c:s", default_to_global=True)["compatibilityLevel"] == "NONE"
    registry.set_config("s", {"compatibilityLevel": "FORWARD"})
    registry.set_config("s", {"normalize": True})
    assert registry.config("s") == {"compatibilityLevel": "FORWARD", "normalize": True}
    assert registry.delete_config("s") == {"compatibilityLevel": "FORWARD", "normalize": True}
    with pytest.raises(registry_errors.UnknownSubject):
        registry.delete_config("s")
    with pytest.raises(registry_errors.InvalidCompatibility):
        registry.set_config("s", {"compatibilityLevel": "SIDEWAYS"})
    with pytest.raises(registry_errors.InvalidSchema):
        registry.set_config("s", {"compatiblity": "NONE"})
    for settings in ({"compatibilityGroup": ["a"]}, {"normalize": "yes"}, {"defaultRuleSet": 5}):
        with pytest.raises(registry_errors.InvalidSchema):
            registry.set_config("s", settings)
    with pytest.raises(registry_errors.NoSubjectConfig):
        registry.config("s")


def test_a_group_that_is_no_name_groups_nothing(store: LogStore, registry: SchemaRegistry) -> None:
    """An invalid group name, as another registry may have stored it, is ignored: all versions are compared."""
    registry.register("s", Draft('"int"', metadata={"properties": {"a": ["x"]}}))
    value = encode_object("s", {"compatibilityGroup": ["a"]})
    store.topic("_schemas").partition(0).append([value], [encode_key("CONFIG", "s")])
    with pytest.raises(registry_errors.IncompatibleSchema):
        registry.register("s", Draft('"string"', metadata={"properties": {"a": ["x"]}}))


def test_the_last_id_and_the_last_version_are_the_last(registry: SchemaRegistry) -> None:
    """After an import of the highest id and version, registrations are refused; other contexts still have ids."""
    registry.set_mode("s", "IMPORT")
    last = (1 << 31) - 1
    registry.register("s", Draft('"int"', id=last, version=last))
    registry.set_mode("s", "READWRITE")
    for subject in ("s", "s2"):
        with pytest.raises(registry_errors.NotPermitted):
            registry.register(subject, Draft('"long"'))
    assert registry.register("s2", Draft('"int"')).id == last
    assert registry.register(":.c:s", Draft('"long"')).id == 1
    assert registry.versions("s") == [last]


def test_contexts_have_ids_of_their_own(registry: SchemaRegistry) -> None:
    """Contexts share neither ids nor schemas; a subject of another context is found by its full name."""
    here, there = registry.register("s", Draft('"int"')), registry.register(":.c:s", Draft('"string"'))
    assert (here.id, there.id) == (1, 1)
    assert registry.contexts() == [".", ".c"]
    assert registry.subjects() == [":.c:s", "s"]
    assert registry.subjects("") == ["s"]
    assert registry.by_id(1, ":.c:s").schema == '"string"'
    assert registry.by_id(1).schema == '"int"'
    assert registry.register(":.:s", Draft('"int"')) == here


WRONG: list[tuple[Callable[[SchemaRegistry], object], type[registry_errors.SchemaError]]] = [
    (lambda registry: registry.register("", Draft('"int"')), registry_errors.InvalidSubject),
    (lambda registry: registry.register("a\nb", Draft('"int"')), registry_errors.InvalidSubject),
    (lambda registry: registry.register("__GLOBAL", Draft('"int"')), registry_errors.InvalidSubject),
    (lambda registry: registry.register("s", Draft("")), registry_errors.InvalidSchema),
    (lambda registry: registry.register("s", Draft('{"type":"record"}')), registry_errors.InvalidSchema),
    (lambda registry: registry.register("s", Draft('"int"', "XML")), registry_errors.InvalidSchema),
    (lambda registry: registry.register("s", Draft("[" * 5000, "JSON")), registry_errors.InvalidSchema),
    (lambda registry: registry.register("s", Draft('"' + "x" * (1 << 20) + '"')), registry_errors.InvalidSchema),
    (lambda registry: registry.register("s", Draft('"int"', id=1 << 31)), registry_errors.InvalidSchema),
    (lambda registry: registry.version("s", "first"), registry_errors.InvalidSchemaVersion),
    (lambda registry: registry.version("s", 0), registry_errors.InvalidSchemaVersion),
    (lambda registry: registry.version("s", "99999999999"), registry_errors.InvalidSchemaVersion),
    (lambda registry: registry.by_id(1), registry_errors.UnknownSchema),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_told_and_changes_nothing(registry: SchemaRegistry, store: LogStore, number: int) -> None:
    """A refused operation raises its error, and does not create the topic."""
    call, error = WRONG[number]
    with pytest.raises(error) as told:
        call(registry)
    assert str(told.value)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
    assert "_schemas" not in store.topics()


def test_a_reader_of_the_store_reads_schemas(store: LogStore) -> None:
    """A read-only store can read the registry, and refuses changes."""
    record = store.schemas.register("s", Draft('"int"'))
    with LogStore(store.path, read_only=True, background=False) as reader:
        assert reader.schemas.by_id(record.id) == record
        assert reader.schemas.register("s", Draft('"int"')) == record  # registered already
        with pytest.raises(ReadOnlyStore):
            reader.schemas.register("s", Draft('"long"'))
        store.schemas.register("s", Draft('"long"'))
        assert reader.schemas.versions("s") == [1, 2]


def test_schemas_are_compared_before_others_have_to_wait(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison runs without the lock of the store; versions registered meanwhile are compared afterwards."""
    registry.register("s", record_of("a"))
    journal, log = registry._journal, []
    writing, compare = journal.writing, registry_module.incompatibilities
    meanwhile: list[Draft] = []

    @contextlib.contextmanager
    def noted() -> Iterator[Any]:
        for draft in [meanwhile.pop()] if meanwhile else []:
            registry.register("s", draft, force=True)
        with writing() as state:
            log.append("lock")
            yield state

    def noted_compare(*args: Any) -> list[str]:
        log.append("compare")
        return compare(*args)

    monkeypatch.setattr(journal, "writing", noted)
    monkeypatch.setattr(registry_module, "incompatibilities", noted_compare)
    registry.register("s", record_of("a", OPTIONAL))
    assert log == ["compare", "lock"]
    with pytest.raises(registry_errors.IncompatibleSchema):
        registry.register("s", record_of("a", "c"))
    assert log == ["compare", "lock", "compare"]
    meanwhile.append(Draft('"int"'))
    with pytest.raises(registry_errors.IncompatibleSchema):
        registry.register("s", record_of("a", OPTIONAL, {**OPTIONAL, "name": "d"}))
    assert log[3:] == ["compare", "lock", "lock", "compare"]
