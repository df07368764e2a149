"""The store: topics come, change and go, for every process that has it open."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import tree_bytes, values

import segmentlog
from segmentlog.errors import (
    InvalidConfig,
    InvalidTopicName,
    ReadOnlyStore,
    SegmentlogError,
    StoreClosed,
    StoreVersionError,
    TopicExists,
    UnknownTopic,
)
from segmentlog.store import LogStore

HEAVY = {"asyncio", "ssl", "subprocess", "multiprocessing", "starlette", "obstore", "pyspark", "click", "rich"}
"""Modules that only a part of the package needs."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a new store without threads."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        yield store


def test_topics_are_created_listed_altered_renamed_and_deleted(store: LogStore) -> None:
    """The life of a topic, as `LogStore` shows it and as the folder does."""
    assert store.topics() == []
    topic = store.create_topic("b", partitions=3, segment_bytes="1MiB", config={"retention.ms": "7d"})
    store.create_topic("a")
    assert store.topics() == ["a", "b"]
    assert topic.partition_count == len(topic.partitions()) == 3
    assert topic.config.segment_bytes == 1 << 20
    topic.partition(2).append([b"kept"])
    store.alter_topic("b", {"segment.bytes": 4096}, partitions=5, fsync="never")
    assert (topic.config.segment_bytes, topic.config.retention_ms, topic.partition_count) == (4096, 7 * 86_400_000, 5)
    assert topic.partition(4).append([b"in a new one"]) == 0
    renamed = store.rename_topic("b", "c")
    assert store.topics() == ["a", "c"]
    assert values(renamed.partition(2)) == [b"kept"]
    with pytest.raises(UnknownTopic):
        store.topic("b")
    store.delete_topic("c")
    assert store.topics() == ["a"]
    assert sorted(path.name for path in Path(store.path).iterdir()) == ["@administration", "a", "store.json"]
    again = store.create_topic("c")
    assert values(again.partition(0)) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "../a",
        "/etc",
        "a\0b",
        "a b",
        "ä",
        "a@b",
        "x" * 250,
        "__consumer_offsets",
        "store.json",
        None,
        7,
    ],
)
def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path, store: LogStore, name: str) -> None:
    """Kafka's rule for names: nothing outside the store's folder can be named, created or deleted."""
    store.create_topic("t")
    before = tree_bytes(tmp_path)
    for call in (
        store.create_topic,
        store.delete_topic,
        store.alter_topic,
        lambda name: store.rename_topic("t", name),
        lambda name: store.rename_topic(name, "u"),
    ):
        with pytest.raises(InvalidTopicName):
            call(name)
    with pytest.raises((InvalidTopicName, UnknownTopic)):
        store.topic(name)
    assert tree_bytes(tmp_path) == before


def test_what_exists_is_not_overwritten(store: LogStore) -> None:
    """Creating or renaming onto a topic raises `TopicExists`, and both keep their records."""
    store.create_topic("a").partition(0).append([b"a"])
    store.create_topic("b").partition(0).append([b"b"])
    with pytest.raises(TopicExists):
        store.create_topic("a", partitions=4)
    with pytest.raises(TopicExists):
        store.rename_topic("a", "b")
    assert values(store.topic("a").partition(0)) == [b"a"]
    assert values(store.topic("b").partition(0)) == [b"b"]


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_key": 1}, {"segment_bytes": 1}, {"segment_bytes": "lots"}, {"fsync": "sometimes"}, {"partitions": 0},
        {"partitions": -1}, {"partitions": True}, {"partitions": 1.5}, {"cleanup_policy": "burn"},
        {"config": {"segment.bytes": 5000}, "segment_bytes": 6000},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_configuration_changes_nothing(store: LogStore, options: dict[str, Any]) -> None:
    """`InvalidConfig` names the key; creating and altering a topic leave the files unchanged."""
    store.create_topic("t", partitions=2)
    before = tree_bytes(Path(store.path))
    calls: list[Callable[..., object]] = [lambda **given: store.create_topic("u", **given)]
    calls.append(lambda **given: store.alter_topic("t", **given))
    for call in calls:
        with pytest.raises(InvalidConfig) as caught:
            call(**options)
        assert caught.value.key
    with pytest.raises(InvalidConfig):
        store.alter_topic("t", partitions=1)
    assert tree_bytes(Path(store.path)) == before


def test_what_does_not_exist_is_unknown(store: LogStore) -> None:
    """Topics and partitions that are not there raise `UnknownTopic`, whatever is asked of them."""
    store.create_topic("t", partitions=2)
    for call in (
        lambda: store.topic("u"),
        lambda: store.delete_topic("u"),
        lambda: store.alter_topic("u"),
        lambda: store.rename_topic("u", "v"),
        lambda: store.topic("t").partition(2),
        lambda: store.topic("t").partition(1 << 70),
        lambda: store.topic("t").partition(-1),
    ):
        with pytest.raises(UnknownTopic):
            call()
    for number in ("0", 1.0, True):
        with pytest.raises(InvalidConfig, match="partition"):
            store.topic("t").partition(number)  # type: ignore[arg-type]


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_read_only_store_writes_nothing(tmp_path: Path, killed: bool) -> None:
    """A read-only store changes no byte and no file, for any read, and also after a kill."""
    store = opened(segmentlog.open(tmp_path / "store", background=False))
    partition = store.create_topic("t", segment_bytes=300, index_interval_bytes=1, fsync="never").partition(0)
    sent: list[bytes | None] = [b"%d" % number for number in range(20)]
    for value in sent:
        partition.append([value])
    if killed:
        partition.abandon()
        (tmp_path / "store" / "t" / "0" / "state").unlink()
        for index in (tmp_path / "store" / "t" / "0").glob("*index"):
            index.unlink()
    else:
        store.close()
    before = tree_bytes(tmp_path)
    with segmentlog.open(tmp_path / "store", read_only=True) as reader:
        log = reader.topic("t").partition(0)
        assert values(log, 0) == sent
        assert log.offset_for_timestamp(0) == 0
        assert [record.value for record in reader.consumer("t")] == sent
        assert len(log.segments()) > 3
        for call in (
            lambda: log.append([b"x"]), lambda: log.trim(1), lambda: log.truncate(1),
            lambda: reader.create_topic("u"), lambda: reader.delete_topic("t"), lambda: reader.alter_topic("t"),
            lambda: reader.rename_topic("t", "u"), reader.producer,
        ):  # fmt: skip
            with pytest.raises(ReadOnlyStore):
                call()
    assert tree_bytes(tmp_path) == before
    if killed:
        again = opened(segmentlog.open(tmp_path / "store", background=False))
        partition = again.topic("t").partition(0)
        assert values(partition, 0) == sent


def test_a_read_only_store_follows_a_live_one(tmp_path: Path) -> None:
    """Appends of another process show while it is open."""
    with segmentlog.open(tmp_path / "store") as store:
        partition = store.create_topic("t").partition(0)
        partition.append([b"a"])
        with segmentlog.open(tmp_path / "store", read_only=True) as reader:
            assert values(reader.topic("t").partition(0)) == [b"a"]
            partition.append([b"b"])
            assert values(reader.topic("t").partition(0)) == [b"a", b"b"]


def test_two_stores_on_one_folder_share_everything(tmp_path: Path) -> None:
    """Topics, records and changes of one are the other's at once."""
    one = opened(segmentlog.open(tmp_path / "store", background=False))
    two = opened(segmentlog.open(tmp_path / "store", background=False))
    assert one.store_id == two.store_id
    one.create_topic("t")
    assert two.topics() == ["t"]
    assert one.topic("t").partition(0).append([b"one"]) == 0
    assert two.topic("t").partition(0).append([b"two"]) == 1
    assert values(one.topic("t").partition(0)) == values(two.topic("t").partition(0)) == [b"one", b"two"]
    two.delete_topic("t")
    assert one.topics() == []
    one.close()
    assert two.topics() == []


def test_an_alter_is_seen_by_appends_that_follow(tmp_path: Path) -> None:
    """A partition that is open in another process uses the new configuration from its next append on."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        partition = store.create_topic("t", fsync="never").partition(0)
        partition.append([b"a", b"b", b"c"])
        script = (
            "import sys, segmentlog; segmentlog.open(sys.argv[1]).alter_topic('t', segment_records=2, fsync='always')"
        )
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True, timeout=60)
        partition.append([b"d"])
        partition.append([b"e"])
        assert partition.config.segment_records == 2
        assert [segment.base_offset for segment in partition.segments()] == [0, 3]
        assert partition.append([b"f"]) == 5
        assert partition.durable_offset == 6


def test_a_topic_deleted_while_open_is_unknown(tmp_path: Path) -> None:
    """A process that had the topic open gets `UnknownTopic`; a new topic of that name starts empty."""
    one = opened(segmentlog.open(tmp_path / "store", background=False))
    two = opened(segmentlog.open(tmp_path / "store", background=False))
    one.create_topic("t").partition(0).append([b"old"])
    stale = two.topic("t").partition(0)
    stale.append([b"old too"])
    one.delete_topic("t")
    for _ in range(2):
        for call in (
            lambda: stale.append([b"x"]),
            lambda: stale.append([b"x"], ack="durable"),
            lambda: list(stale.read(0)),
            lambda: stale.trim(1),
        ):
            with pytest.raises(UnknownTopic):
                call()
        if "t" not in one.topics():
            one.create_topic("t")
    assert values(two.topic("t").partition(0)) == []
    assert two.topic("t").partition(0).append([b"new"]) == 0
    assert values(one.topic("t").partition(0)) == [b"new"]
    two.close()
    one.close()


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 3, "store_id": "x"}',
        '{"format": "1", "store_id": "x"}',
        "{}",
        "",
        "[]",
        "null",
        '{"format": 1}',
        "\x00\xff",
    ],
)
def test_a_store_of_another_version_is_not_touched(tmp_path: Path, text: str) -> None:
    """A newer format or a damaged ``store.json`` raises `StoreVersionError` that names the file."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t")
    (tmp_path / "store" / "store.json").write_text(text, encoding="latin-1")
    before = tree_bytes(tmp_path)
    for read_only in (False, True):
        with pytest.raises(StoreVersionError, match=r"store\.json"):
            segmentlog.open(tmp_path / "store", read_only=read_only)
    assert tree_bytes(tmp_path) == before


def test_a_topic_of_another_version_is_not_touched(tmp_path: Path) -> None:
    """A topic of another format version raises an error and stays unchanged, and other topics work."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("new")
        store.create_topic("old").partition(0).append([b"a"])
        file = tmp_path / "store" / "new" / "topic.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 3}))
        with pytest.raises(StoreVersionError, match="new"):
            store.topic("new")
        assert values(store.topic("old").partition(0)) == [b"a"]


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    """A folder with other things in it, a file, a missing one without ``create``: no stores; nothing is made."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    before = tree_bytes(tmp_path)
    for path, create in (("home", True), ("file", True), ("missing", False)):
        with pytest.raises(StoreVersionError):
            segmentlog.open(tmp_path / path, create=create)
    with pytest.raises(StoreVersionError):
        segmentlog.open(tmp_path / "missing", read_only=True)
    assert tree_bytes(tmp_path) == before
    (tmp_path / "empty").mkdir()
    with segmentlog.open(tmp_path / "empty") as store:
        assert store.topics() == []


def test_a_closed_store_says_so(store: LogStore) -> None:
    """Everything after `close` raises `StoreClosed`; closing again does nothing."""
    partition = store.create_topic("t").partition(0)
    store.close()
    store.close()
    for call in (store.topics, lambda: store.topic("t"), lambda: store.create_topic("u"), lambda: store.consumer("t"),
                 store.producer, lambda: partition.append([b"a"])):  # fmt: skip
        with pytest.raises(StoreClosed):
            call()


def test_the_background_flush_keeps_the_policys_promise(tmp_path: Path) -> None:
    """Under ``fsync=20ms``, appended records become durable in the background."""
    with segmentlog.open(tmp_path / "store") as store:
        partition = store.create_topic("t", fsync="20ms").partition(0)
        partition.append([b"a"])
        waited = threading.Event()
        for _ in range(500):
            if partition.durable_offset == 1:
                break
            waited.wait(0.01)
        assert partition.durable_offset == 1
        assert store.health() == {}


def test_a_topic_that_exists_is_kept_where_that_is_wanted(store: LogStore) -> None:
    """With ``exist_ok`` it is returned with its records and configuration; another partition count is refused."""
    topic = store.create_topic("t", partitions=2, fsync="never", exist_ok=True)
    topic.partition(1).append([b"kept"])
    for partitions in (None, 2):
        again = store.create_topic("t", partitions, {"retention.ms": 1}, exist_ok=True)
        assert (again.id, again.partition_count, again.config) == (topic.id, 2, topic.config)
    for partitions in (1, 3):
        with pytest.raises(TopicExists, match=rf"it has 2 partitions, but {partitions} were asked for; nothing was"):
            store.create_topic("t", partitions, exist_ok=True)
    assert values(store.topic("t").partition(1)) == [b"kept"]
    assert store.create_topic("u", exist_ok=True).partition_count == 1
    with pytest.raises(InvalidConfig):
        store.create_topic("t", 0, exist_ok=True)
    with pytest.raises(InvalidConfig, match="exist_ok"):
        store.create_topic("t", exist_ok="yes")  # type: ignore[arg-type]


def test_threads_that_ensure_one_topic_all_get_it(tmp_path: Path) -> None:
    """Many threads create the same topic at once with ``exist_ok``: all succeed."""
    stores = [opened(segmentlog.open(tmp_path / "store", background=False)) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: stores[at % 2].create_topic("t", 2, exist_ok=True).id, range(8)))
    assert len(set(found)) == 1


def test_threads_that_create_one_topic_agree(tmp_path: Path) -> None:
    """Many threads create the same topic at once, in two stores: one succeeds and the others get `TopicExists`."""
    stores = [opened(segmentlog.open(tmp_path / "store", background=False)) for _ in range(2)]
    outcomes: list[str] = []

    def create(store: LogStore) -> None:
        try:
            store.create_topic("t", partitions=2)
            outcomes.append("made")
        except SegmentlogError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=create, args=(stores[number % 2],)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(outcomes) == ["TopicExists"] * 7 + ["made"]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["@administration", "store.json", "t"]


def test_hundreds_of_partitions_under_a_small_descriptor_limit(tmp_path: Path) -> None:
    """300 partitions, all appended to and read again and again, with 256 descriptors."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "import segmentlog\n"
        "store = segmentlog.open(sys.argv[1], background=False)\n"
        "topic = store.create_topic('t', partitions=300, fsync='never')\n"
        "for turn in range(3):\n"
        "    for number in range(300):\n"
        "        assert topic.partition(number).append([b'%d' % number]) == turn\n"
        "for number in range(300):\n"
        "    found = [value for batch in topic.partition(number).read(0) for value in batch.values]\n"
        "    assert found == [b'%d' % number] * 3\n"
        "assert sum(1 for record in store.consumer('t')) == 900\n"
        "store.close()\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_nothing_is_loaded_that_threads_have_no_use_for(tmp_path: Path) -> None:
    """A program that appends, sends and reads does not load asyncio, servers or other clients."""
    code = (
        "import sys, segmentlog\n"
        f"with segmentlog.open({str(tmp_path / 'store')!r}) as store:\n"
        "    store.create_topic('t').partition(0).append([b'x'])\n"
        "    with store.producer(name='p') as producer, producer.transaction():\n"
        "        producer.send('t', b'y')\n"
        "    with store.consumer('t', group='g') as consumer:\n"
        "        assert next(iter(consumer)).value == b'x'\n"
        f"print(*({HEAVY!r} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
