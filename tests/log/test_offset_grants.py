"""A partition of a shipped store assigns no offsets beyond its grant, in any process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from segmentlog.errors import OffsetGrantExhausted, StoreFenced
from segmentlog.format.grant import MalformedGrant, OffsetGrant, decode_grant, encode_grant
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log import offset_grants
from segmentlog.log.partition import Partition
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.grant_file import read_grant
from segmentlog.store import LogStore

pytestmark = pytest.mark.usefixtures("small_steps")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a store with a topic whose log has reserved offsets up to some ceiling."""
    with LogStore(tmp_path / "store", background=False) as opened:
        opened.create_topic("t").partition(0).append([b"first"])
        yield opened


def log_of(store: LogStore) -> Partition:
    """Return the partition of the topic."""
    return store.topic("t").partition(0)


def fill_up(log: Partition) -> list[int]:
    """Append until no more offsets are assigned; return them."""
    offsets = []
    while True:
        try:
            offsets.append(log.append([b"x"]))
        except OffsetGrantExhausted:
            return offsets


def test_what_is_reserved_is_the_first_limit(store: LogStore) -> None:
    """Before the first grant the reserved offsets are the limit. A larger batch leaves them to smaller ones."""
    log = log_of(store)
    ceiling = offset_grants.start_limiting(log.handle)
    assert offset_grants.start_limiting(log.handle) == ceiling, "asked again it is the same"
    with pytest.raises(OffsetGrantExhausted, match=r"offset 11 or above.*ship"):
        log.append([b"too many"] * ceiling)
    assert fill_up(log) == list(range(1, ceiling - 1))
    assert [record.offset for batch in log.read(0) for record in batch] == list(range(ceiling - 1))


def test_a_grant_lets_appends_go_on_up_to_it(store: LogStore) -> None:
    """A later, lower grant withdraws nothing."""
    log = log_of(store)
    offset_grants.start_limiting(log.handle)
    fill_up(log)
    offset_grants.extend(log.handle, 40)
    offset_grants.extend(log.handle, 20)
    assert fill_up(log)[-1] == 38
    assert log.log_end_offset == 39


def test_other_processes_and_later_ones_are_bound_by_it(store: LogStore) -> None:
    """The limit is the folder's, not this process's."""
    log = log_of(store)
    offset_grants.start_limiting(log.handle)
    offset_grants.extend(log.handle, 30)
    script = (
        "import sys, segmentlog\n"
        "log = segmentlog.open(sys.argv[1], background=False).topic('t').partition(0)\n"
        "try:\n"
        "    while True: last = log.append([b'theirs'])\n"
        "except segmentlog.OffsetGrantExhausted as error: print(last, error.ceiling)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, store.path], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["28", "30"]
    with pytest.raises(OffsetGrantExhausted):
        log.append([b"ours"])


def test_a_fence_stops_all_who_have_the_log_open(store: LogStore, tmp_path: Path) -> None:
    """It stops appends, markers, truncation and trims, also after a restart, until it is released; reads continue."""
    log = log_of(store)
    with LogStore(store.path, background=False) as other:
        theirs = log_of(other)
        theirs.append([b"second"])
        offset_grants.fence(log.handle, "the other machine (owner's epoch 2)")
        for one in (log, theirs):
            for _ in range(2):
                with pytest.raises(StoreFenced, match="the other machine"):
                    one.append([b"x"])
            with pytest.raises(StoreFenced):
                one.truncate(1)
            with pytest.raises(StoreFenced):
                one.trim(1)
            with pytest.raises(StoreFenced):
                one.roll()
            assert [record.value for batch in one.read(0) for record in batch] == [b"first", b"second"]
    with LogStore(store.path, background=False) as later:
        with pytest.raises(StoreFenced):
            log_of(later).append([b"x"])
        offset_grants.remove(log_of(later).handle)
        assert log_of(later).append([b"x"]) == 2
    assert log.append([b"y"]) == 3
    assert [one.what for one in inspect_store(store.path) if one.severity != "note"] == []


def test_a_grant_that_rotted_grants_nothing_and_is_told(store: LogStore) -> None:
    """If any bit of the grant changes, no offset beyond the reserved ones is assigned."""
    log = log_of(store)
    offset_grants.start_limiting(log.handle)
    offset_grants.extend(log.handle, 1000)
    path = Path(log.folder) / "grant"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            rotten = bytearray(whole)
            rotten[position] ^= 1 << bit
            path.write_bytes(rotten)
            assert read_grant(FileSystem(), log.folder) == OffsetGrant(0), (position, bit)
    (found,) = [one for one in inspect_store(store.path) if one.severity != "note"]
    assert (found.severity, found.path) == ("warning", str(path))
    end = fill_up(log)[-1]
    assert end < 1000
    offset_grants.start_limiting(log.handle)
    offset_grants.extend(log.handle, 1000)
    assert log.append([b"x"]) == end + 1


def test_what_is_no_grant_is_refused() -> None:
    """A grant that is empty, or out of range with a right checksum, is refused."""
    assert decode_grant(encode_grant(OffsetGrant(7, "who"))) == OffsetGrant(7, "who")
    for wrong in (OffsetGrant(-1), OffsetGrant(2**63)):
        with pytest.raises(MalformedGrant):
            decode_grant(encode_grant(wrong))
    with pytest.raises(MalformedGrant):
        decode_grant(b"")
