"""A prototype of a follower: copies one topic from a leader, and confirms what is on its disk. Not part of the package.

``python -m bench.replication.follower LEADER FOLDER TOPIC PARTITIONS NUMBER MODE SYNC TRACE_PATH``

MODE
    serial      fetch, append, sync, fetch. The next fetch confirms what was synced
    overlapped  the next fetch leaves before the sync. After the sync, batches that arrived meanwhile are appended, and
                a fetch confirms what was synced
SYNC
    each        one fdatasync after the other
    N           the same in N threads
    syncfs      one syncfs for the whole file system
    journal     one file gets the batches of all partitions, and one fdatasync
    none        no fsync

On SIGTERM it prints one line of JSON: rounds, batches, fsyncs and their time.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import segmentlog
from bench.server.wire import connect
from segmentlog.format.batch import (
    CHECKED_SIZE,
    HEADER,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    MAGIC,
    PLACE_SIZE,
    hash_of,
)
from segmentlog.log.partition import Partition
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_response_header, frame_request
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from segmentlog.storage.interrupt_safe import EXCLUSIVE, UNLOCK
from segmentlog.storage.state_page import LogState

_FETCH, _VERSION = 1, 12
_PARTITION_BYTES = 8 << 20
_WAIT_MS = 500
_size_of = struct.Struct(">i").unpack_from

trace: list[tuple[str, float, int]] = []


class Copy:
    """One partition of the follower."""

    def __init__(self, number: int, partition: Partition) -> None:
        self.number = number
        self.partition = partition
        self.end = partition.log_end_offset
        self.confirmed = 0

    def append(self, data: memoryview) -> int:
        """Check batches and append them unchanged. Return how many they are."""
        partition = self.partition
        handle, appender = partition.handle, partition._appender
        writer = appender._writer
        with handle.append_mutex:
            handle.ensure_open()
            handle.fs.flock(handle.lock_fd, EXCLUSIVE)
            try:
                log = appender._current_log()
                found, offset = _check_batches(data, log.log_end_offset)
                if offset >= log.offset_ceiling:
                    log = appender._raise_ceiling(log, offset)
                index, segment, position = writer._index, writer._segment, log.end_position
                assert index is not None
                assert segment is not None
                handle.ledger.start_append()
                segment.write([data], len(data), position)
                after = LogState(
                    log.log_start_offset, offset, offset, log.active_base_offset, position + len(data), log.epoch,
                    log.generation, log.appended_bytes + len(data), log.first_append_ms or 1, log.offset_ceiling,
                )  # fmt: skip
                handle.ledger.publish(after)
                for at, base, following, max_timestamp, size in found:
                    index.observe(position + at, base, following, max_timestamp, size)
                writer.seen = after
                appender.appended = True
            finally:
                handle.fs.flock(handle.lock_fd, UNLOCK)
        self.end = offset
        return len(found)

    def sync(self) -> None:
        """Make everything durable."""
        self.partition._syncer.sync(self.end)


def _check_batches(data: memoryview, expected: int) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """Return (position, base offset, next offset, largest timestamp and size of each batch; the offset after all)."""
    at, end = 0, len(data)
    found = []
    while at < end:
        (magic, attributes, _, base, _, last_delta, _, max_timestamp, _, _, _, payload_size, _, _, _, _, _, checksum,
         header_checksum) = HEADER.unpack_from(data, at)  # fmt: skip
        start = at + HEADER_SIZE
        stop = start + payload_size
        hashed_from = start + PLACE_SIZE if attributes & KAFKA_LAYOUT else start
        if (
            magic != MAGIC
            or base != expected
            or stop > end
            or hash_of(data[at : at + CHECKED_SIZE]) != header_checksum
            or hash_of(data[hashed_from:stop]) != checksum
        ):
            raise ValueError(f"a bad batch at offset {expected}")
        expected = base + last_delta + 1
        found.append((at, base, expected, max_timestamp, stop - at))
        at = stop
    return found, expected


class Fetcher:
    """One connection to the leader."""

    def __init__(self, address: tuple[str, int], topic: str, copies: list[Copy], number: int) -> None:
        self._socket = connect(address)
        self._socket.settimeout(None)
        self._topic = topic
        self._copies = {copy.number: copy for copy in copies}
        self._number = number
        self._buffer = memoryview(bytearray(64 << 20))
        self._have = 0
        self.in_flight = 0

    def send(self, moved: list[Copy], synced: list[Copy] | None = None) -> None:
        """Fetch. The request lists only these partitions. Those in ``synced`` only confirm: an earlier fetch from the
        same offset may have been answered already.
        """
        ends = dict.fromkeys(synced or (), -1) | {copy: copy.end for copy in moved}
        wanted = [
            FetchPartition(copy.number, fetch_offset=end, log_start_offset=copy.confirmed,
                           partition_max_bytes=_PARTITION_BYTES)
            for copy, end in ends.items()
        ]  # fmt: skip
        topics = [FetchTopic(topic=self._topic, partitions=wanted)] if wanted else []
        request = FetchRequest(replica_id=self._number, max_wait_ms=_WAIT_MS, min_bytes=1, topics=topics)
        api = APIS[_FETCH]
        self._socket.sendall(
            b"".join(frame_request(api, _VERSION, 1, "f", api.codec.encode_request(request, _VERSION)))
        )
        self.in_flight += 1

    def is_readable(self) -> bool:
        """Return whether an answer has begun to arrive."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> list[tuple[Copy, memoryview]]:
        """Wait for the next answer. The views are valid until the next call."""
        size = self._need(4, 0)
        (length,) = _size_of(self._buffer, 0)
        self._need(4 + length, size)
        api = APIS[_FETCH]
        frame = self._buffer[4 : 4 + length]
        _, at = decode_response_header(frame, api, _VERSION)
        response: FetchResponse = api.codec.decode_response(frame, at, _VERSION)
        self._consumed = 4 + length
        self.in_flight -= 1
        found = []
        for topic in response.responses:
            for one in topic.partitions:
                assert one.error_code == 0
                found.append((self._copies[one.partition_index], memoryview(one.records)))  # type: ignore[arg-type]
        return found

    _consumed = 0

    def _need(self, size: int, have: int) -> int:
        if self._consumed:
            rest = self._have - self._consumed
            self._buffer[:rest] = bytes(self._buffer[self._consumed : self._have])
            self._have, self._consumed = rest, 0
        while self._have < size:
            count = self._socket.recv_into(self._buffer[self._have :])
            if not count:
                raise EOFError("the leader closed the connection")
            self._have += count
        return self._have


class Rounds:
    """Syncs partitions, and counts."""

    def __init__(self, how: str, folder: str) -> None:
        self._how = how
        self._pool = ThreadPoolExecutor(int(how)) if how.isdecimal() else None
        self._folder_fd = os.open(folder, os.O_RDONLY)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._journal_fd = os.open(f"{folder}/journal", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._journal_fd, 0, 1 << 30)
        self._journal_position = 0
        self.unsynced: list[memoryview] = []
        self.rounds = self.syncs = self.batches = self.size_bytes = 0
        self.sync_s = self.append_s = 0.0
        self.longest_s = 0.0
        self.times_s: list[float] = []

    def sync(self, copies: list[Copy]) -> None:
        """Make these partitions durable, and confirm that with the next fetch."""
        began_s = time.perf_counter()
        if self._how == "syncfs":
            if self._libc.syncfs(self._folder_fd):
                raise OSError(ctypes.get_errno(), "syncfs")
        elif self._how == "journal":
            for at in range(0, len(self.unsynced), 1000):
                self._journal_position += os.pwritev(
                    self._journal_fd, self.unsynced[at : at + 1000], self._journal_position % (1 << 29)
                )
            os.fdatasync(self._journal_fd)
        elif self._pool is not None and len(copies) > 1:
            list(self._pool.map(Copy.sync, copies))
        elif self._how != "none":
            for copy in copies:
                copy.sync()
        self.unsynced.clear()
        for copy in copies:
            copy.confirmed = copy.end
        took_s = time.perf_counter() - began_s
        self.sync_s += took_s
        self.times_s.append(took_s)
        self.rounds += 1
        self.syncs += len(copies)

    def report(self) -> str:
        """Return the counts as JSON."""
        ordered = sorted(self.times_s) or [0.0]
        return json.dumps({
            "rounds": self.rounds, "syncs": self.syncs, "batches": self.batches, "bytes": self.size_bytes,
            "sync_s": self.sync_s, "append_s": self.append_s, "round_p50_ms": ordered[len(ordered) // 2] * 1000,
            "round_p99_ms": ordered[len(ordered) * 99 // 100] * 1000,
            "cpu_s": time.process_time(),
        })  # fmt: skip


def follow(fetcher: Fetcher, rounds: Rounds, copies: list[Copy], *, is_overlapped: bool, is_traced: bool) -> NoReturn:
    """Copy until a signal."""

    def append(answer: list[tuple[Copy, memoryview]]) -> list[Copy]:
        began_s = time.perf_counter()
        for copy, data in answer:
            rounds.batches += copy.append(data)
            rounds.unsynced.append(data)
            rounds.size_bytes += len(data)
            if is_traced:
                trace.append(("follower received", began_s, copy.end))
                trace.append(("follower appended", time.perf_counter(), copy.end))
        rounds.append_s += time.perf_counter() - began_s
        return [copy for copy, _ in answer]

    def sync(some: list[Copy]) -> None:
        rounds.sync(some)
        if is_traced:
            now_s = time.perf_counter()
            trace.extend(("follower synced", now_s, copy.end) for copy in some)

    fetcher.send(copies)
    while not is_overlapped:
        changed = append(fetcher.receive())
        if changed:
            sync(changed)
        fetcher.send(changed)
    while True:
        changed = append(fetcher.receive())
        if not changed:
            if not fetcher.in_flight:
                fetcher.send([])
            continue
        while changed:
            if not fetcher.in_flight:
                fetcher.send(changed)
            sync(changed)
            synced = changed
            changed = append(fetcher.receive()) if fetcher.is_readable() else []
            fetcher.send(changed, synced)


def main() -> None:
    """Follow one topic."""
    leader, folder, topic, count, number, mode, how, trace_path = sys.argv[1:]
    host, _, port = leader.rpartition(":")
    store = segmentlog.open(folder, background=False)
    logs = store.create_topic(topic, int(count), fsync="never")
    copies = [Copy(at, logs.partition(at)) for at in range(int(count))]
    rounds = Rounds(how, folder)

    def stop(*_: object) -> NoReturn:
        if trace_path != "-":
            with open(trace_path, "w", encoding="ascii") as file:
                json.dump(trace, file)
        print(rounds.report(), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    fetcher = Fetcher((host, int(port)), topic, copies, int(number))
    print("ready", flush=True)
    try:
        follow(fetcher, rounds, copies, is_overlapped=mode == "overlapped", is_traced=trace_path != "-")
    except (EOFError, ConnectionError):
        stop()


if __name__ == "__main__":
    main()
