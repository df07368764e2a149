"""A `logging.Handler` that appends JSON to a topic, and never keeps its caller for longer than it says."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from segmentlog.arguments import as_bool, as_int, as_mapping
from segmentlog.errors import (
    InvalidConfig,
    InvalidRecord,
    PartitionFailed,
    ProcessLimitError,
    RecordTooLarge,
    SegmentlogError,
    ShipUnconfirmed,
    StoreClosed,
    TopicExists,
    UnknownTopic,
)
from segmentlog.format.file_names import check_topic_name
from segmentlog.logs.buffer import Buffer, Line
from segmentlog.logs.log_record_json import render
from segmentlog.records import Headers
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_safe import try_lock
from segmentlog.store import LogStore
from segmentlog.topics.background_threads import Worker
from segmentlog.weak_sets import members_of

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack
    from segmentlog.producing.producer import Producer

Key = Literal["logger"] | Callable[[logging.LogRecord], str | bytes | None] | None
HeadersOf = Mapping[str, str] | Callable[[logging.LogRecord], Mapping[str, str]] | None

_AT_ONCE_BYTES: Final = 1 << 20
_RETRY_MAX_S: Final = 2.0
_IDLE_S: Final = 3600.0
_LOOK_S: Final = 0.01
_OF_THE_RECORD: Final = (RecordTooLarge, InvalidRecord)
"""What would be the same however often the record is sent: it alone is given up."""


class _NoLock:
    """In place of `logging.Handler.lock`, for which everybody would wait who logs while one does."""

    def acquire(self, *_: object) -> bool:
        return True

    def release(self) -> None: ...

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None: ...

    def _at_fork_reinit(self) -> None: ...


class LogHandler(logging.Handler):
    """Appends what is logged to a topic, as JSON: see `segmentlog.logs.log_record_json.render` for the fields.

    store         an open store, or a folder, which is opened (or made) and closed with the handler
    topic         made when it is missing, with ``partitions`` and ``config``, unless ``create_topic`` is False
    static        fields that every record has
    key           "logger": the name of the logger; or a function that makes one of a LogRecord: a text, bytes or None
    headers       of each record: a mapping of texts, or a function that makes one of a LogRecord
    ack           "written", "durable" or "shipped", as with a producer
    buffer_bytes  what waits to be appended
    block_ms      how long a call waits for room when that is full; then the record is dropped, and until something was
                  appended no other call waits at all
    flush_ms      how long `flush` and `close` wait

    A call renders the record and leaves it to a thread. What was dropped is counted by `dropped`, and told by a record
    as soon as there is room again. What cannot be appended, on a full disk, say, is tried again; `handleError`
    is called once for each such time. What segmentlog logs while this thread appends is left out: it would not end.

    A formatter is not asked.

    Any number of processes may log to one topic. After a fork the child's handler has a thread of its own. A record is
    appended once; the death of the process takes what was not appended yet, milliseconds as a rule.
    """

    def __init__(
        self,
        store: LogStore | str | os.PathLike[str],
        topic: str = "logs",
        level: int | str = logging.NOTSET,
        *,
        create_topic: bool = True,
        partitions: int = 1,
        config: Mapping[str, object] | None = None,
        static: Mapping[str, Any] | None = None,
        key: Key = None,
        headers: HeadersOf = None,
        ack: Ack | None = None,
        buffer_bytes: int = 8 << 20,
        block_ms: int = 100,
        flush_ms: int = 5000,
    ) -> None:
        super().__init__(level)
        self.topic = check_topic_name(topic)
        self._create_topic = as_bool("create_topic", create_topic)
        self._partitions = partitions
        self._config = dict(as_mapping("config", config, "keys of a topic's configuration"))
        self._static = dict(as_mapping("static", static, "a mapping of names to values"))
        if not (key is None or key == "logger" or callable(key)):
            raise InvalidConfig("key", key, "'logger', a function of a LogRecord, or None")
        if not (headers is None or callable(headers) or isinstance(headers, Mapping)):
            raise InvalidConfig("headers", headers, "a mapping of texts, a function of a LogRecord, or None")
        self._key, self._headers = key, headers
        self._ack: Ack | None = ack
        self._block_s = as_int("block_ms", block_ms, 0) / 1000
        self._flush_s = as_int("flush_ms", flush_ms, 0) / 1000
        self._buffer = Buffer(as_int("buffer_bytes", buffer_bytes, 1))
        self._pending: list[Line] = []
        self._unsynced: list[Line] = []
        """Appended, and not known to be on the disk, as ``ack`` asks for."""
        self._producer: Producer | None = None
        self._told_dropped = 0
        self._is_failing = self._is_unshipped = self._is_called = self._closed_for_good = False
        self._retry_s = 0.0
        self._appending = 0
        """The thread that is at it."""
        self._turn = fork_safety.lock(self, "_turn")
        """Of who appends: the thread, or who flushes when there is none."""
        self._path = None if isinstance(store, LogStore) else os.fspath(store)
        self._store = store if isinstance(store, LogStore) else LogStore(store)
        self._worker = Worker("logs", self._tick)
        fork_safety.on_fork(self, "_forget_parent")
        try:
            self._ensure_topic()
            self._producer = self._store.producer(ack=ack, linger_ms=1000, tracing="off")
        except BaseException:
            self._close_store()
            raise
        _handlers.add(self)

    def _forget_parent(self) -> None:
        """In a forked child: what waits is the parent's to append."""
        self._pending, self._unsynced, self._producer = [], [], None
        self._told_dropped = self._appending = 0
        self._is_failing = self._is_unshipped = self._is_called = False

    def createLock(self) -> None:
        """None is held: nothing here has to be done by one at a time."""
        self.lock = _NoLock()  # type: ignore[assignment]

    # ------------------------------------------------------------ logging

    def emit(self, record: logging.LogRecord) -> None:
        """Render a record, and leave it to the thread."""
        is_own = threading.get_ident() == self._appending
        if is_own and record.name.partition(".")[0] == "segmentlog":
            return
        try:
            line = Line(
                render(record, record.getMessage(), self._static), self._key_of(record), self._headers_of(record),
                int(record.created * 1000), time.time_ns() // 1_000_000,
            )  # fmt: skip
            if self._closed_for_good:
                self._buffer.drop(1)
            elif self._buffer.put(line, 0.0 if is_own else self._block_s):
                self._wake()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def _key_of(self, record: logging.LogRecord) -> bytes | None:
        key = record.name if self._key == "logger" else self._key(record) if callable(self._key) else None
        return key.encode("utf-8", "backslashreplace") if isinstance(key, str) else key

    def _headers_of(self, record: logging.LogRecord) -> Headers:
        if self._headers is None:
            return ()
        headers = self._headers(record) if callable(self._headers) else self._headers
        return tuple((str(name), str(value).encode("utf-8", "backslashreplace")) for name, value in headers.items())

    def _wake(self) -> None:
        worker = self._worker
        worker.has_work = True
        if not worker.is_running:
            try:
                worker.ensure_running()
            except RuntimeError:  # too late in the life of the program: flush does it
                return
        if not self._is_called and not self._is_failing:  # it tries again by itself
            self._is_called = True
            worker.wake()

    @property
    def dropped(self) -> int:
        """How many records of this process were dropped."""
        return self._buffer.dropped

    def flush(self) -> None:
        """Wait until what was logged is appended, up to ``flush_ms``."""
        self.flushed(self._flush_s)

    def flushed(self, timeout_s: float) -> bool:
        """The same, for so long; False when it was not in time."""
        if threading.get_ident() == self._appending:
            return False
        if self._worker.is_running:
            self._worker.wake()
            return self._buffer.wait(timeout_s)
        ends_s = time.monotonic() + timeout_s
        while not self._buffer.is_empty and time.monotonic() < ends_s:
            pause_s = self._tick()
            if not self._buffer.is_empty:
                time.sleep(max(min(pause_s, ends_s - time.monotonic()), 0.0))
        return self._buffer.is_empty

    def close(self) -> None:
        """Flush, up to ``flush_ms``, and take no more. A store that was given as a folder is closed. Idempotent."""
        if not self._closed_for_good:
            ends_s = time.monotonic() + self._flush_s
            self.flushed(self._flush_s)
            self._closed_for_good = True
            if self._worker.is_running:
                self._worker.wake()  # it closes what may block, and nobody waits for it any longer than
                self._worker.join(max(ends_s - time.monotonic(), 0.0) + 0.1)
            else:
                self._close_clients()
            left = self._buffer.count
            if left:
                self._buffer.drop(left)
                self._tell_error(f"{left} records of the log could not be appended within {self._flush_s} s")
            self._worker.ask_to_stop()
            _handlers.discard(self)
        super().close()

    # ------------------------------------------------------------ appending, in the thread

    def _tick(self) -> float:
        with try_lock(self._turn) as is_free:
            if not is_free:  # who flushes found no thread at it, and then there is one: two would append the same
                return _LOOK_S
            self._appending = threading.get_ident()
            self._is_called = False  # before the look: what comes from now on calls again
            try:
                return self._append_all()
            finally:
                self._appending = 0

    def _append_all(self) -> float:
        while True:
            appended_count = 0
            if not self._unsynced:
                lines = self._pending or list(self._buffer.take(_AT_ONCE_BYTES))
                self._pending = lines
                if not lines:
                    self._worker.has_work = False
                    break
                appended_count = self._append(lines)
            appended_count += self._sync()
            if self._pending or self._unsynced:
                self._retry_s = min(max(2 * self._retry_s, 0.05), _RETRY_MAX_S)
                if self._closed_for_good:
                    break
                return self._retry_s
            if appended_count:
                self._retry_s, self._is_failing = 0.0, False
                self._tell_dropped()
        if self._closed_for_good:
            self._close_clients()
            self._worker.ask_to_stop()
        return _IDLE_S

    def _append(self, lines: list[Line]) -> int:
        """Append lines: how many were, as ``ack`` asks for it. Those that are to be tried again are pending."""
        from segmentlog.producing.producer import passed_at

        sent: list[tuple[Line, Any]] = []
        given_up: list[Line] = []
        first: Exception | None = None
        try:
            producer = self._ready_producer()
            try:
                for line in lines:
                    try:
                        with passed_at(line.passed_ms):
                            delivery = producer.send(
                                self.topic, line.value, line.key, headers=line.headers or None,
                                timestamp=line.timestamp_ms,
                            )  # fmt: skip
                        sent.append((line, delivery))
                    except _OF_THE_RECORD as error:
                        first = first or error
                        given_up.append(line)
            finally:
                producer.flush()  # also after a send that raised what kept earlier lines out: that is told by it
        except (SegmentlogError, OSError) as error:
            first = error
        failed: list[Line] = []
        unsynced: list[Line] = []
        unshipped: ShipUnconfirmed | None = None
        for line, delivery in sent:
            failure = delivery.exception()
            if isinstance(failure, ShipUnconfirmed):
                unshipped = failure
            elif failure is not None:
                first = first or failure
                (unsynced if isinstance(failure, ProcessLimitError) and failure.appended else failed).append(line)
        if isinstance(first, ShipUnconfirmed):  # appended it is, and shipped as soon as that is possible
            first = None
        reached = len(sent) + len(given_up)
        again = failed + lines[reached:]
        if isinstance(first, StoreClosed) and self._path is None:
            given_up += again
            again = []
        self._pending = again  # first of all: whatever happens from here on, nothing is appended twice
        self._unsynced = unsynced
        waiting = {id(line) for lines_left in (again, unsynced) for line in lines_left}
        self._buffer.drop(len(given_up))
        if unshipped is not None and not self._is_unshipped:
            self._tell_error("the log is not shipped", unshipped)
        self._is_unshipped = unshipped is not None
        if first is not None:
            self._note(first)  # who flushes finds it told
        self._buffer.done([line for line in lines if id(line) not in waiting])
        return len(lines) - len(waiting) - len(given_up)

    def _sync(self) -> int:
        """Bring to the disk what is appended, and could not be: how many lines were."""
        if not self._unsynced:
            return 0
        try:
            self._ready_producer()
            for partition in self._store.topic(self.topic).partitions():
                partition.flush()
        except (SegmentlogError, OSError) as error:
            self._note(error)
            if self._path is not None or not isinstance(error, StoreClosed):
                return 0
        lines, self._unsynced = self._unsynced, []
        self._buffer.done(lines)
        return len(lines)

    def _ready_producer(self) -> Producer:
        if self._producer is None:
            if self._store.is_closed and self._path is not None:
                # As the program ends stores are closed before the last record is logged. It has no need of threads.
                self._store = LogStore(self._path, background=False)
            self._ensure_topic()
            self._producer = self._store.producer(ack=self._ack, linger_ms=1000, tracing="off")
        return self._producer

    def _ensure_topic(self) -> None:
        try:
            self._store.topic(self.topic)
        except UnknownTopic:
            if not self._create_topic:
                raise
            try:
                self._store.create_topic(self.topic, self._partitions, self._config)
            except TopicExists:  # another process was faster
                pass

    def _note(self, error: Exception) -> None:
        """Something failed: mend what can be, and say so once."""
        if isinstance(error, StoreClosed | PartitionFailed | UnknownTopic):
            producer, self._producer = self._producer, None
            if producer is not None:
                with contextlib.suppress(SegmentlogError, OSError):  # nothing waits in it: what failed is pending here
                    producer.close()  # its thread would go on until somebody collects garbage
            if isinstance(error, PartitionFailed) and self._path is not None:
                self._close_store()  # opened anew it recovers
            if isinstance(error, StoreClosed) and self._path is not None:
                return  # as the program ends; it is opened anew
        if not self._is_failing or isinstance(error, _OF_THE_RECORD):
            self._is_failing = not isinstance(error, _OF_THE_RECORD)
            self._tell_error("the log cannot be appended to", error)

    def _tell_error(self, text: str, error: Exception | None = None) -> None:
        """As `logging.Handler.handleError` does it; where it cannot be told there is nobody to tell that."""
        record = logging.LogRecord(
            "segmentlog.logs", logging.ERROR, __file__, 0, "topic %s: %s: %s", (self.topic, text, error or ""), None
        )
        try:
            raise error or SegmentlogError(text)
        except Exception:
            with contextlib.suppress(Exception):  # a stderr that is closed, say
                self.handleError(record)

    def _tell_dropped(self) -> None:
        """A record of those that were dropped, by the way that all go."""
        count = self._buffer.dropped - self._told_dropped
        if count:
            text = f"{count} records that were logged here before this one were dropped: the log could not keep up"
            record = logging.LogRecord("segmentlog.logs", logging.WARNING, __file__, 0, text, None, None)
            record.dropped = count
            key = None
            with contextlib.suppress(Exception):  # the function is made for other records
                key = self._key_of(record)
            created_ms = int(record.created * 1000)
            line = Line(render(record, text, self._static), key, (), created_ms, created_ms)
            if self._buffer.put(line, 0.0):
                self._told_dropped += count

    def _close_clients(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.close()
            except (SegmentlogError, OSError) as error:
                self._note(error)
        self._close_store()

    def _close_store(self) -> None:
        if self._path is not None:
            try:
                self._store.close()
            except (SegmentlogError, OSError) as error:
                self._tell_error("its store was not closed cleanly", error)


_handlers: weakref.WeakSet[LogHandler] = weakref.WeakSet()


@atexit.register
def _flush_handlers() -> None:
    """Before stores are closed as the program ends, which comes before `logging.shutdown`."""
    for handler in members_of(_handlers):
        handler.flush()
