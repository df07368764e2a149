"""Create the stores in ``format-1/``. This ran once, with the last release that wrote format 1; never run it again.

    python tests/stores/make_format_1.py

``NAME.tar.gz`` is a store. ``NAME.json`` is its content as that release read it. ``read_only`` is the content of the
unchanged store. ``written`` is the content after opening the store for writing, which recovers unclosed partitions and
ends undecided transactions; it is null if the content is the same.

    closed   every payload shape, many settings, segments, partitions; compacted; producers, transactions, groups;
             closed cleanly
    killed   left by processes that were killed: in the middle of transactions and appends, one after its decision
    lost     trimmed, truncated, and copied while it was live, so that it lost what was not on disk
"""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import signal
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from stores.described import describe

import segmentlog
from segmentlog.clock import Clock
from segmentlog.format.file_names import FORMAT_VERSION
from segmentlog.store import LogStore

STORES = Path(__file__).parent / "format-1"
NOW_MS = 1_790_000_000_000

_SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on


class FixedClock(Clock):
    """Nothing expires while tests look."""

    def now_ms(self) -> int:
        return NOW_MS


def open_fixed(path: Path, **options: Any) -> LogStore:
    """Open a store on a day on which nothing in it is old."""
    return LogStore(path, background=False, clock=FixedClock(), **options)


_LASTING: dict[str, object] = {"retention.ms": -1, "producer.id.expiration.ms": "3650d"}


def _payloads(store: LogStore) -> None:
    shapes: list[dict[str, Any]] = [
        {"values": [b"a", b"", None, b"b" * 300]},
        {"values": [b"1", b"2", None], "keys": [b"k", None, b""]},
        {"values": [b"x", b"y"], "headers": [[("trace", b"\x00\x01"), ("trace", None)], None]},
        {"values": [b"z"], "headers": [[("Größe", b"")]], "keys": [b"\xff\x00"]},
        {"values": [b"t1", b"t2", b"t3"], "timestamps": [NOW_MS, 0, NOW_MS + 2**31]},
        {"values": [b"t4", b"t5"], "timestamps": [5, 5]},
        {"values": [b"line %d of a text that LZ4 can do something about" % number for number in range(60)],
         "keys": [b"key %d" % (number % 7) for number in range(60)],
         "headers": [[("n", b"%d" % number)] for number in range(60)]},
    ]  # fmt: skip
    settings: dict[str, dict[str, object]] = {
        "plain": {"compression.type": "none"},
        "lz4": {"compression.type": "lz4", "fsync": "always"},
        "stamped": {"message.timestamp.type": "LogAppendTime", "fsync": "20ms"},
        "small-segments": {"segment.bytes": 700, "fsync": "3records", "index.interval.bytes": 200},
        "never": {"fsync": "never", "segment.records": 9, "retention.segments": 100, "max.message.bytes": 5000},
        "by-size": {"fsync": "1KiB", "compression.type": "none"},
    }
    for name, changed in settings.items():
        topic = store.create_topic(name, 2, {**_LASTING, **changed})
        for number, shape in enumerate(shapes):
            topic.partition(number % 2).append(**shape)
        topic.partition(1).append([b"durable"], ack="durable")
    store.create_topic("empty", 3, _LASTING)


def _compacted(store: LogStore) -> None:
    topic = store.create_topic(
        "compacted", 1, {**_LASTING, "cleanup.policy": "compact", "segment.records": 10, "delete.retention.ms": "3650d"}
    )
    log = topic.partition(0)
    for number in range(45):
        value = None if number % 11 == 10 else b"value %d" % number
        log.append([value, b"v"], [b"key %d" % (number % 6), b"other %d" % (number % 4)])
    log.roll()
    log.compact()
    log.append([b"behind", None], [b"key 1", b"key 2"])


def _producing(store: LogStore) -> None:
    store.create_topic("sent", 2, _LASTING)
    store.create_topic("audit", 1, {**_LASTING, "segment.records": 8})
    with store.producer() as anonymous:
        for number in range(5):
            anonymous.send_many("sent", [b"anonymous %d" % number], partition=0)
    for instance in range(3):
        with store.producer(name="bank") as producer:
            with producer.transaction(note=f"note {instance}"):
                producer.send_many("sent", [b"committed %d" % instance] * 3, partition=instance % 2)
                producer.send("audit", b"who %d" % instance)
            producer.begin_transaction()
            producer.send_many("sent", [b"aborted %d" % instance] * 2, partition=0)
            producer.send_many("audit", [b"aborted %d" % instance] * 2)
            producer.abort_transaction()
            producer.send_many("audit", [b"plain of a name"])
    with store.producer(name="loader") as loader:
        loader.note_resume("sent", 2)
        loader.send_many("sent", [b"loaded"] * 4, partition=1)


def _grouped(store: LogStore) -> None:
    store.create_topic("orders", 3, _LASTING)
    store.create_topic("gone", 1, _LASTING).partition(0).append([b"1"])
    for number in range(3):
        store.topic("orders").partition(number).append([b"order %d" % one for one in range(10 + number)])
    with store.consumer("orders", "gone", group="billing") as consumer:
        for batch in consumer.batches():
            del batch
        consumer.commit(metadata="all of it")
        consumer.commit({("orders", 1): 7}, metadata="not so far")
    with (
        store.consumer("orders", group="invoicing", isolation="read_committed") as consumer,
        store.producer() as producer,
    ):
        for batch in consumer.batches():
            with producer.transaction():
                producer.send_many("audit", [b"invoice"] * len(batch))
                producer.commit_positions(consumer)
            if batch.partition == 1:
                break
    store.groups.reset("by-hand", {segmentlog.TopicPartition("orders", 2): 5}, metadata="\u00e4")
    store.groups.reset("forgotten", {segmentlog.TopicPartition("orders", 2): 5})
    store.groups.delete("forgotten")
    store.delete_topic("gone")
    store.create_topic("before", 1, _LASTING).partition(0).append([b"1", b"2"])
    store.groups.reset("renamed", {segmentlog.TopicPartition("before", 0): 1})
    store.rename_topic("before", "after")


def make_closed(path: Path) -> None:
    """Fill a store with everything, and close it."""
    with open_fixed(path) as store:
        _payloads(store)
        _compacted(store)
        _producing(store)
        _grouped(store)


def make_killed(path: Path) -> None:
    """Undecided, decided and torn things of dead processes."""
    with open_fixed(path) as store:
        store.create_topic("a", 2, _LASTING)
        store.create_topic("b", 1, {**_LASTING, "segment.records": 6})
        store.create_topic("read", 1, _LASTING).partition(0).append([b"to read"] * 9)
        store.groups.reset("halfway", {segmentlog.TopicPartition("read", 0): 3})

    alive: list[object] = []

    def undecided() -> None:
        store = open_fixed(path)
        store.topic("a").partition(0).append([b"before"], ack="durable")
        producer = store.producer(name="undecided")
        producer.begin_transaction()
        producer.send_many("a", [b"undecided"] * 3, partition=0)
        producer.send_many("b", [b"undecided"] * 3)
        consumer = store.consumer("read", group="halfway")
        batches = consumer.batches()
        next(batches)
        producer.commit_positions(consumer)
        store.topic("a").partition(0).append([b"behind"], ack="durable")
        alive.extend((store, producer, consumer, batches))

    def decided() -> None:
        store = open_fixed(path)
        producer = store.producer(name="decided")
        producer.begin_transaction()
        producer.send_many("a", [b"decided"] * 3, partition=1)
        producer.send_many("b", [b"decided"] * 3)
        producer.flush()
        store.transactions._complete = lambda name, state: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        producer.commit_transaction(note="it was decided")

    def torn() -> None:
        store = open_fixed(path)
        log = store.topic("b").partition(0)
        log.append([b"whole"], ack="durable")
        handle = log.handle
        real = handle.fs.pwritev

        def half(fd: int, buffers: Any, position: int) -> int:
            data = b"".join(buffers)
            real(fd, [data[: len(data) // 2]], position)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        handle.fs.pwritev = half  # type: ignore[method-assign]
        log.append([b"torn, and never acknowledged"])

    with _living(undecided):  # while it lives, no process ends its transaction
        for work in (torn, decided):
            with _living(work):
                pass


@contextlib.contextmanager
def _living(work: Callable[[], None]) -> Iterator[None]:
    """Run a process that does its work or dies in it; kill it at the end."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        work()
        theirs.send(None)
        time.sleep(3600)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        ours.recv()
    try:
        yield
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def make_lost(path: Path) -> None:
    """Lost ranges and epochs."""
    with open_fixed(path) as store:
        log = store.create_topic("cut", 1, {**_LASTING, "segment.records": 5}).partition(0)
        for number in range(23):
            log.append([b"cut %d" % number])
        log.trim(7)
        log.truncate(18)
        log.append([b"behind the cut"] * 4)
        log.truncate(20)
        log.append([b"and once more"] * 2)
    with open_fixed(path) as store:
        store.topic("cut").partition(0).append([b"not closed"], ack="durable")
        store.create_topic("young", 1, _LASTING).partition(0).append([b"1", b"2"], ack="durable")
        _copy(path, path.with_name("copied"))
    _copy(path.with_name("copied"), path)
    with open_fixed(path) as store:  # as after a machine's death: it is another folder
        store.topic("young").partition(0).append([b"behind what is lost"])
        store.topic("cut").partition(0).append([b"behind what is lost"])


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def pack(path: Path, target: Path) -> None:
    """Pack a store into a small archive; equal stores give equal bytes."""
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, 0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for one in sorted(path.rglob("*")):
            info = archive.gettarinfo(one, str(one.relative_to(path)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = NOW_MS // 1000
            if one.is_file():
                with one.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)


def unpack(archive: Path, path: Path) -> Path:
    """Return the store of an archive, put there."""
    with tarfile.open(archive) as packed:
        packed.extractall(path, **_SAFELY)
    return path


def main() -> None:
    """Make what is not there."""
    assert FORMAT_VERSION == 1, "the stores are of format 1, and are never made again"
    STORES.mkdir(exist_ok=True)
    socket.gethostname = lambda: "host"  # members write it down
    for name, make in {"closed": make_closed, "killed": make_killed, "lost": make_lost}.items():
        archive = STORES / f"{name}.tar.gz"
        if archive.exists():
            print(f"{archive} is there: it stays as it is")
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            make(path)
            time.sleep(0.01)
            pack(path, archive)
            found: dict[str, Any] = {"made_by": segmentlog.__version__, "at_ms": NOW_MS}
            for key, read_only in (("read_only", True), ("written", False)):
                with open_fixed(unpack(archive, Path(folder) / key), read_only=read_only) as store:
                    if not read_only:
                        for topic in store.topics(internal=True):
                            store.topic(topic).partitions()
                        store.finish_transactions()
                    found[key] = describe(store)
        if found["written"] == found["read_only"]:
            found["written"] = None
        (STORES / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")
        print(f"{archive}: {archive.stat().st_size} bytes")


if __name__ == "__main__":
    main()
