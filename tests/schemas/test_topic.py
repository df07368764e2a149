"""The topic `_schemas`: written by other registries, damaged, on a full disk, and with many writers."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import FullDisk

from segmentlog.errors import CorruptBatch, DiskFull
from segmentlog.schemas import registry_errors
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_records import (
    SchemaRecord,
    decode_key,
    decode_schema,
    encode_key,
    encode_schema,
    encode_schema_key,
)
from segmentlog.store import LogStore

# Keys and values as Confluent's registry 5.5 to 8.0 writes them.
MIRRORED: list[tuple[str, str | None]] = [
    ('{"keytype":"NOOP","magic":0}', None),
    ('{"keytype":"CONFIG","subject":null,"magic":0}', '{"compatibilityLevel":"FULL"}'),
    (
        '{"keytype":"SCHEMA","subject":"orders-value","version":1,"magic":1}',
        '{"subject":"orders-value","version":1,"id":1,"schema":"{\\"type\\":\\"record\\",\\"name\\":\\"Order\\",'
        '\\"fields\\":[{\\"name\\":\\"id\\",\\"type\\":\\"long\\"}]}","deleted":false}',
    ),
    (
        '{"keytype":"SCHEMA","subject":"orders-value","version":2,"magic":1}',
        '{"subject":"orders-value","version":2,"id":4,"md5":"Zm9vYmFyYmF6cXV4MTIzNA==","schema":"{\\"type\\":'
        '\\"record\\",\\"name\\":\\"Order\\",\\"fields\\":[{\\"name\\":\\"id\\",\\"type\\":\\"long\\"},{\\"name\\":'
        '\\"note\\",\\"type\\":\\"string\\",\\"default\\":\\"\\"}]}","deleted":false}',
    ),
    (
        '{"keytype":"SCHEMA","subject":"pay-value","version":1,"magic":1}',
        '{"subject":"pay-value","version":1,"id":2,"schemaType":"PROTOBUF","references":[],"schema":'
        '"syntax = \\"proto3\\";\\npackage shop;\\n\\nmessage Pay {\\n  int32 cents = 1;\\n}\\n","deleted":false}',
    ),
    (
        '{"keytype":"SCHEMA","subject":"ship-value","version":1,"magic":1}',
        '{"subject":"ship-value","version":1,"id":3,"schemaType":"JSON","schema":"{\\"type\\":\\"object\\"}",'
        '"deleted":false,"metadata":{"properties":{"owner":"me"}}}',
    ),
    ('{"keytype":"CONFIG","subject":"pay-value","magic":0}', '{"subject":"pay-value","compatibilityLevel":"NONE"}'),
    ('{"keytype":"MODE","subject":"ship-value","magic":0}', '{"subject":"ship-value","mode":"READONLY"}'),
    ('{"keytype":"SCHEMA","subject":"old-value","version":1,"magic":1}',
     '{"subject":"old-value","version":1,"id":5,"schema":"\\"int\\"","deleted":false}'),
    ('{"keytype":"DELETE_SUBJECT","subject":"old-value","magic":0}', '{"subject":"old-value","version":1}'),
    ('{"keytype":"SCHEMA","subject":"gone-value","version":1,"magic":1}',
     '{"subject":"gone-value","version":1,"id":9,"schema":"\\"long\\"","deleted":true}'),
    ('{"keytype":"SCHEMA","subject":"gone-value","version":1,"magic":1}', None),
    ('{"keytype":"CLEAR_SUBJECT","subject":"gone-value","magic":0}', '{"subject":"gone-value"}'),
    ('{"keytype":"CONTEXT","tenant":"default","context":".lab","magic":0}', '{"tenant":"default","context":".lab"}'),
    ('{"keytype":"ASSOC","tenant":"default","resourceName":"x","magic":0}', '{"anything":[1]}'),
    ('{"keytype":"FROM_THE_FUTURE","magic":3}', "no JSON at all"),
    ("not a key", "not a value"),
    # The id of another schema: the record is skipped, so a client never gets a wrong schema for the id.
    ('{"keytype":"SCHEMA","subject":"liar-value","version":1,"magic":1}',
     '{"subject":"liar-value","version":1,"id":1,"schema":"\\"bytes\\"","deleted":false}'),
]  # fmt: skip


def mirrored(store: LogStore) -> None:
    """Create the topic of another registry, as a mirror copies it."""
    store.create_topic("_schemas", cleanup_policy="compact")
    store.topic("_schemas").partition(0).append(
        [None if value is None else value.encode() for _, value in MIRRORED], [key.encode() for key, _ in MIRRORED]
    )


def test_the_topic_of_another_registry_is_read(tmp_path: Path) -> None:
    """Subjects, ids, settings and deletions equal the other registry's; unknown records are skipped and kept."""
    with LogStore(tmp_path / "store", background=False) as store:
        mirrored(store)
        registry = store.schemas
        assert registry.subjects() == ["orders-value", "pay-value", "ship-value"]
        assert registry.subjects(only_deleted=True) == ["old-value"]
        assert registry.config() == {"compatibilityLevel": "FULL"}
        assert registry.config("pay-value") == {"compatibilityLevel": "NONE"}
        assert registry.mode("ship-value") == "READONLY"
        assert registry.version("ship-value").metadata == {"properties": {"owner": "me"}}
        assert registry.by_id(1).subject == "orders-value"
        order = json.loads(registry.version("orders-value", 1).schema)
        assert registry.register("orders-value", Draft(json.dumps(order, indent=2))).id == 1
        cents = 'syntax = "proto3"; package shop; message Pay { int32 cents = 1; }'
        assert registry.register("other", Draft(cents, "PROTOBUF")).id == 2
        assert registry.register("new", Draft('"string"')).id == 10
        keys = [record.key for record in store.consumer("_schemas")]
        assert keys[: len(MIRRORED)] == [key.encode() for key, _ in MIRRORED]


def test_records_are_written_as_others_read_them() -> None:
    """Keys and values equal Confluent's byte for byte, and decode to the same records."""
    record = SchemaRecord("s", 1, 7, '"int"')
    assert encode_schema_key("s", 1) == b'{"keytype":"SCHEMA","subject":"s","version":1,"magic":1}'
    assert encode_schema(record) == b'{"subject":"s","version":1,"id":7,"schema":"\\"int\\"","deleted":false}'
    assert decode_schema(encode_schema(record)) == record
    assert encode_key("CONFIG", None) == b'{"keytype":"CONFIG","magic":0}'
    assert encode_key("MODE", "s") == b'{"keytype":"MODE","subject":"s","magic":0}'
    assert decode_key(encode_key("NOOP", None)) is None


@pytest.mark.parametrize(
    ("options", "why"), [({"cleanup_policy": "delete"}, "cleanup.policy"), ({"partitions": 2}, "more than one")]
)
def test_nothing_is_registered_where_it_would_be_lost(tmp_path: Path, options: dict[str, object], why: str) -> None:
    """A topic that deletes old records, or has several partitions, is refused with an error that names the remedy."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("_schemas", **{"cleanup_policy": "compact", **options})  # type: ignore[arg-type]
        with pytest.raises(registry_errors.NotPermitted, match=why):
            store.schemas.register("s", Draft('"int"'))
        assert store.schemas.subjects() == []


def test_a_full_disk_registers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a registration raises, reads continue, and registrations work again after space is freed."""
    disk = FullDisk(monkeypatch.setattr, str(tmp_path))
    with LogStore(tmp_path / "store", background=False) as store:
        first = store.schemas.register("s", Draft('"int"'))
        disk.is_full = True
        with pytest.raises(DiskFull):
            store.schemas.register("t", Draft('"long"'))
        assert store.schemas.register("s", Draft('"int"')) == first
        assert store.schemas.subjects() == ["s"]
        disk.is_full = False
        assert store.schemas.register("t", Draft('"long"')).id > first.id


def test_damage_is_told_and_gives_no_id_twice(tmp_path: Path) -> None:
    """Damage in the topic raises `CorruptBatch`; after a repair, no id is assigned twice."""
    with LogStore(tmp_path / "store", background=False) as store:
        for number in range(3):
            store.schemas.register(f"s{number}", Draft(f'{{"type":"fixed","name":"F","size":{number + 1}}}'))
    path = tmp_path / "store/_schemas/0/00000000000000000000.log"
    data = bytearray(path.read_bytes())
    position = data.index(b'"size\\":3')
    data[position] ^= 1
    path.write_bytes(data)
    with LogStore(tmp_path / "store", background=False) as store:
        with pytest.raises(CorruptBatch):
            store.schemas.register("t", Draft('"int"'))
        with pytest.raises(CorruptBatch):
            store.schemas.subjects()
    subprocess.run(
        [sys.executable, "-m", "segmentlog", "--dir", str(tmp_path / "store"), "repair", "_schemas", "--yes"],
        check=True, capture_output=True,
    )  # fmt: skip
    with LogStore(tmp_path / "store", background=False) as store:
        assert store.schemas.subjects() == ["s0", "s1"]
        assert store.schemas.register("t", Draft('"int"')).id == 4


@pytest.mark.parametrize("data", [b"", b"0" * 17 + b"{}\n", b"\0" * 40])
def test_a_damaged_mark_of_ids_is_made_anew(tmp_path: Path, data: bytes) -> None:
    """After damage to the file of ids, new ids continue after the highest id in the topic."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.schemas.register("s", Draft('"int"'))
        (tmp_path / "store/@schemas").write_bytes(data)
        assert store.schemas.register("t", Draft('"long"')).id == 2
        assert b'".":2' in (tmp_path / "store/@schemas").read_bytes()


def _register_many(path: str, number: int, found: "multiprocessing.Queue[dict[str, int]]") -> None:
    with LogStore(path, background=False) as store:
        ids = {}
        for size in range(1, 21):
            draft = Draft(f'{{"type":"fixed","name":"F","size":{size}}}')
            ids[f"{size}"] = store.schemas.register(f"s{size}-{number}", draft).id
        found.put(ids)


def test_processes_that_register_at_once_agree_on_ids(tmp_path: Path) -> None:
    """Processes that register at the same time agree on one id for each schema, and on different ids for others."""
    with LogStore(tmp_path / "store"):
        pass
    spawn = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[dict[str, int]] = spawn.Queue()
    workers = [
        spawn.Process(target=_register_many, args=(str(tmp_path / "store"), number, found)) for number in range(3)
    ]
    for worker in workers:
        worker.start()
    results = [found.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert results[0] == results[1] == results[2]
    assert sorted(results[0].values()) == list(range(1, 21))
    found.close()
    found.join_thread()


_DIES = """
import os, signal, sys
from segmentlog.schemas.schemas_topic import SchemaJournal
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.store import LogStore
def die(journal, pairs):
    os.kill(os.getpid(), signal.SIGKILL)
SchemaJournal.append = die
LogStore(sys.argv[1], background=False).schemas.register("s", Draft('"int"'))
"""


def test_a_process_that_dies_before_it_appends_keeps_nobody_out(tmp_path: Path) -> None:
    """A crash before the append frees the lock, and the id that the process took is not assigned again."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.schemas.register("t", Draft('"long"'))
        died = subprocess.run([sys.executable, "-c", _DIES, str(tmp_path / "store")], check=False)
        assert died.returncode == -signal.SIGKILL
        assert store.schemas.register("s", Draft('"int"')).id == 3


def test_a_forked_child_registers_as_its_parent_does(tmp_path: Path) -> None:
    """A child forked while the parent holds the registry's lock waits for it, and reads the topic from its start."""
    with LogStore(tmp_path / "store", background=False) as store:
        registry = store.schemas
        registry.register("s", Draft('"int"'))
        read_end, write_end = os.pipe()
        with registry._journal.writing():
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.close(read_end)
                    os.write(write_end, b"%d" % registry.register("child", Draft('"long"')).id)
                    status = 0
                finally:
                    os._exit(status)
        os.close(write_end)
        assert os.read(read_end, 10) == b"2"
        os.close(read_end)
        assert os.waitpid(child, 0)[1] == 0
        assert registry.version("child").id == 2


def test_a_restored_store_gives_no_id_twice(tmp_path: Path) -> None:
    """A restored store does not assign an id again, also for permanently deleted schemas: shipping copies the ids."""
    url = f"file://{tmp_path}/bucket"
    with LogStore(tmp_path / "store", background=False) as store:
        store.schemas.register("s", Draft('"int"'))
        gone = store.schemas.register("t", Draft('"long"')).id
        store.schemas.delete_subject("t")
        store.schemas.delete_subject("t", permanent=True)
        store.ship(url)
    with LogStore(url, background=False) as attached:
        assert attached.schemas.by_id(1).schema == '"int"'
    subprocess.run(
        [sys.executable, "-m", "segmentlog", "restore", url, str(tmp_path / "restored")],
        check=True,
        capture_output=True,
    )
    with LogStore(tmp_path / "restored", background=False) as restored:
        assert restored.schemas.subjects() == ["s"]
        assert restored.schemas.register("u", Draft('"double"')).id == gone + 1
