"""Stores that a release of format 1 made: `make_format_1` tells what is in them. They are never made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stores.described import describe
from stores.make_format_1 import STORES, open_fixed, unpack

from segmentlog.storage.inspect import inspect_store
from segmentlog.store import LogStore

NAMES = sorted(path.name.removesuffix(".tar.gz") for path in STORES.glob("*.tar.gz"))


def expected(name: str, how: str) -> dict[str, Any]:
    """What the release that made a store found in it."""
    document = json.loads((STORES / f"{name}.json").read_text())
    found: dict[str, Any] = document[how] or document["read_only"]
    return found


def bytes_of(path: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def damage_in(path: Path) -> list[str]:
    """What `verify` would call damage."""
    return [str(one) for one in inspect_store(str(path)) if one.severity == "damage"]


def recover_all(store: LogStore) -> None:
    """Open every partition, and have everything decided."""
    for topic in store.topics(internal=True):
        store.topic(topic).partitions()
    store.finish_transactions()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Of a store."""
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def path(tmp_path: Path, name: str) -> Path:
    """The store, as it was made."""
    return unpack(STORES / f"{name}.tar.gz", tmp_path / "store")


def test_there_are_stores() -> None:
    """The others are not green because they had nothing to open."""
    assert NAMES == ["closed", "killed", "lost"]


def test_opens_as_it_is(path: Path, name: str) -> None:
    """Every record, position and transaction of it is read, and looking changes no byte."""
    before = bytes_of(path)
    with open_fixed(path, read_only=True) as store:
        assert describe(store) == expected(name, "read_only")
    assert bytes_of(path) == before
    assert not damage_in(path)


def test_opens_for_writing(path: Path, name: str) -> None:
    """What it holds is there afterwards, was decided as it had to be, and goes on; once more after a close."""
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
