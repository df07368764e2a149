"""Stores that a release of format 1 created: `make_format_1` describes their content. They are never created again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores.described import describe
from stores.make_format_1 import NOW_MS, STORES, open_fixed, unpack

from segmentlog.format.file_names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, topic_id_of_name
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.records import TopicPartition
from segmentlog.storage.state_page import CONFIG_WORD, MOVED_WORD
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

NAMES = sorted(path.name.removesuffix(".tar.gz") for path in STORES.glob("*.tar.gz"))


def expected(name: str, how: str) -> dict[str, Any]:
    """Return the content of a store as the release that created it read it."""
    document = json.loads((STORES / f"{name}.json").read_text())
    found: dict[str, Any] = document[how] or document["read_only"]
    return found


def bytes_of(path: Path) -> dict[str, bytes]:
    """Return every file of a store."""
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def damage_in(path: Path) -> list[str]:
    """Return the findings of `verify` that are damage."""
    return [str(one) for one in inspect_store(str(path)) if one.severity == "damage"]


def recover_all(store: LogStore) -> None:
    """Open every partition, and have everything decided."""
    for topic in store.topics(internal=True):
        store.topic(topic).partitions()
    store.finish_transactions()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a store."""
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def path(tmp_path: Path, name: str) -> Path:
    """Return the unpacked store."""
    return unpack(STORES / f"{name}.tar.gz", tmp_path / "store")


def test_there_are_stores() -> None:
    """The stores exist: the other tests do not pass only because they had nothing to open."""
    assert NAMES == ["closed", "killed", "lost"]


def test_opens_as_it_is(path: Path, name: str) -> None:
    """Every record, offset and transaction of it is read, and reading changes no byte."""
    before = bytes_of(path)
    with open_fixed(path, read_only=True) as store:
        assert describe(store) == expected(name, "read_only")
    assert bytes_of(path) == before
    assert not damage_in(path)


def test_opens_for_writing(path: Path, name: str) -> None:
    """The store has its content, its transactions are ended rightly, and appends continue, also after a close."""
    wanted = expected(name, "written")
    with open_fixed(path) as store:
        recover_all(store)
        assert describe(store) == wanted
        for topic in store.topics():
            log = store.topic(topic).partition(0)
            end_offset = log.log_end_offset
            assert log.append([b"new"], [b"new"]) == end_offset
    assert not damage_in(path)
    with open_fixed(path) as store:
        found = describe(store)
        assert {**found, "topics": {}} == {**wanted, "topics": {}}
        for topic, was in wanted["topics"].items():
            now = found["topics"][topic]["partitions"]
            assert now[0]["records"][:-1] == was["partitions"][0]["records"]
            assert now[0]["records"][-1][3] == "new"
            assert [one["records"] for one in now[1:]] == [one["records"] for one in was["partitions"][1:]]


# ---------------------------------------------------------------- the upgrade


def formats(path: Path) -> list[int]:
    """Return the format numbers of the store and of each topic."""
    return [json.loads(one.read_text())["format"] for one in (path / "store.json", *sorted(path.glob("*/topic.json")))]


def words(path: Path) -> dict[str, tuple[int, int]]:
    """Return the words of every state page that show its format to processes of the previous release."""
    found = {}
    for file in sorted(path.glob("*/*/state")):
        page = np.frombuffer(file.read_bytes(), np.uint64)
        found[str(file.relative_to(path))] = (int(page[CONFIG_WORD]), int(page[MOVED_WORD]))
    return found


def logs(path: Path) -> dict[str, bytes]:
    """Return the content of every segment file."""
    return {name: data for name, data in bytes_of(path).items() if name.endswith(".log")}


def test_opening_for_writing_upgrades(path: Path, name: str) -> None:
    """The upgrade changes the formats and ids in files, and both words of every page, but no record; it runs once."""
    before = words(path)
    records = logs(path)
    with open_fixed(path, read_only=True) as store:
        ids = {name: store.topic(name).id for name in store.topics(internal=True)}
    assert formats(path) == [1] * len(formats(path))
    with open_fixed(path):
        pass
    assert formats(path) == [2] * len(formats(path))
    after = words(path)
    assert all(one[0] != after[name][0] and one[1] != after[name][1] for name, one in before.items())
    assert logs(path) == records
    upgraded = bytes_of(path)
    with open_fixed(path) as store:
        assert {name: store.topic(name).id for name in store.topics(internal=True)} == ids
        assert len(set(ids.values())) == len(ids)
    assert bytes_of(path) == upgraded
    assert not [one for one in inspect_store(str(path)) if "upgrade" in one.what or "format" in one.what]


@pytest.mark.parametrize("name", ["killed", "lost"], indirect=True)
def test_an_upgrade_that_was_killed_is_finished(path: Path, name: str, tmp_path: Path) -> None:
    """A kill at any call: no state page gets the new format before all files have it; the next opening reads all."""
    wanted = expected(name, "written")
    before, records = words(path), logs(path)
    stride = 1 if name == "lost" else 9  # this one has few files: every call is tried
    for call in range(1, 1000, stride):
        copy = tmp_path / f"copy-{call}"
        shutil.copytree(path, copy)
        fs = FaultyFileSystem()
        fs.die_at(call)
        try:
            store = open_fixed(copy, fs=fs)
        except Died:
            pass
        else:
            store.close()
            assert call > 20
            break
        if words(copy) != before:
            assert formats(copy) == [2] * len(formats(copy))
        assert logs(copy) == records
        if call % 6 == 1:
            assert not damage_in(copy)
            with open_fixed(copy, read_only=True) as store:
                assert describe(store)["positions"] == expected(name, "read_only")["positions"]
            with open_fixed(copy) as store:
                recover_all(store)
                assert describe(store) == wanted
        else:
            with open_fixed(copy):
                pass
        assert formats(copy) == [2] * len(formats(copy))
        after = words(copy)
        assert all(one[0] != after[name][0] and one[1] != after[name][1] for name, one in before.items())
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["closed"], indirect=True)
def test_what_went_by_names_holds_on_to_ids_from_then_on(path: Path) -> None:
    """Positions that were committed by name follow a rename, and are none of the next topic of that name."""
    with open_fixed(path) as store:
        store.rename_topic("orders", "renamed")
        store.create_topic("orders", 3)
        committed = store.group_offsets.committed("billing")
        assert {str(tp): one.offset for tp, one in committed.items()} == {
            "renamed/0": 10, "renamed/1": 7, "renamed/2": 12,
        }  # fmt: skip
        store.delete_topic("renamed")
        store.create_topic("renamed", 3)
        assert store.group_offsets.committed("billing") == {}


@pytest.mark.parametrize("name", ["closed"], indirect=True)
def test_what_was_forgotten_does_not_come_back(path: Path) -> None:
    """Records of format 1 stay forgotten once a compaction has removed what stands for their deletion."""
    with open_fixed(path) as store:
        for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
            store.topic(topic).partition(0).roll()
        store.groups.delete("by-hand")
        store.transactions._log.write("loader", None)
    day_ms = 86_400_000
    for days in (10, 20, 30):
        with open_fixed(path) as store:
            for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
                log = store.topic(topic).partition(0)
                log.append([None], [b"another"])
                log.roll()
                log.compact(now_ms=NOW_MS + days * day_ms)
    with open_fixed(path) as store:
        assert store.group_offsets.groups() == ["billing", "invoicing", "renamed"]
        assert list(store.transactions.states()) == ["bank"]
        keys = [key for batch in store.topic(OFFSETS_TOPIC).partition(0).read(0) for key in batch.keys]
        assert not [key for key in keys if key is not None and b"by-hand" in key]


@pytest.mark.parametrize("name", ["closed"], indirect=True)
def test_a_topic_that_the_release_of_before_makes_meanwhile(path: Path) -> None:
    """A process that has the store open since before the upgrade may still make one: it is another one, with an id."""
    with open_fixed(path) as store:
        old = store.rename_topic("orders", "kept").id
        (path / "orders" / "0").mkdir(parents=True)
        (path / "orders" / "topic.json").write_text('{"format": 1, "partitions": 1, "config": {}}')
        assert store.topic("orders").id not in (old, topic_id_of_name(store.store_id, "orders"))
        assert store.topic("orders").partition(0).append([b"1"]) == 0
        assert formats(path) == [2] * len(formats(path))
        assert TopicPartition("orders", 0) not in store.group_offsets.committed("billing")
