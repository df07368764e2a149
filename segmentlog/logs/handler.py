"""A `logging.Handler` that appends JSON to a topic, and blocks its caller only for a limited time."""

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
from segmentlog.topics.background_threads import BackgroundThread
from segmentlog.weak_sets import members_of

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack
    from segmentlog.producing.producer import Producer

Key = Literal["logger"] | Callable[[logging.LogRecord], str | bytes | None] | None
HeadersOf = Mapping[str, str] | Callable[[logging.LogRecord], Mapping[str, str]] | None

_AT_ONCE_BYTES: Final = 1 << 20
_RETRY_MAX_S: Final = 2.0
_IDLE_S: Final = 3600.0
_CHECK_S: Final = 0.01
_OF_THE_RECORD: Final = (RecordTooLarge, InvalidRecord)
"""Errors that every retry of the record would raise again: the record is dropped."""


class _NoLock:
    """Replacement of `logging.Handler.lock` that does nothing.

    With the real lock, a thread that waits for room in the buffer would make all other logging threads wait.
    """

    def acquire(self, *_: object) -> bool:
        return True

    def release(self) -> None: ...

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None: ...

    def _at_fork_reinit(self) -> None: ...


class LogHandler(logging.Handler):
    """Appends log records to a topic, as JSON: see `segmentlog.logs.log_record_json.render` for the fields.

    store         an open store, or a folder, which is opened (or created) and closed with the handler
    topic         created if it is missing, with ``partitions`` and ``config``, unless ``create_topic`` is False
    static        fields of every record
    key           "logger": the name of the logger; or a function of a LogRecord that returns text, bytes or None
    headers       of each record: a mapping of texts, or a function of a LogRecord that returns one
    ack           "written", "durable" or "shipped", as for a producer
    buffer_bytes  size of the buffer for records that are not appended yet
    block_ms      how long a call waits for room in a full buffer; then its record is dropped. Later calls drop theirs
                  at once, until the buffer has room again
    flush_ms      how long `flush` and `close` wait

    A call renders the record and puts it into the buffer; a background thread appends it. `dropped` counts dropped
    records, and a later log record reports their number. An append that fails, for example because the disk is full, is
    repeated until it succeeds; `handleError` is called once for each series of failures. The handler ignores log
    records of segmentlog from its own thread, because appending them would cause further log records. Formatters are
    not used.

    Any number of processes may log to one topic. A forked child's handler starts its own thread. A record is appended
    once; if the process dies, records of the last milliseconds are usually lost.
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
        """Lines that are appended but not yet on disk, with an ``ack`` that requires it."""
        self._producer: Producer | None = None
        self._reported_dropped = 0
        self._is_failing = self._is_unshipped = self._is_woken = self._closed_for_good = False
        self._retry_s = 0.0
        self._appending_thread = 0
        """Ident of the thread that is appending; 0 if none is."""
        self._append_lock = fork_safety.lock(self, "_append_lock")
        """Held by the thread that appends: the background thread, or a caller of `flush` if that is not running."""
        self._path = None if isinstance(store, LogStore) else os.fspath(store)
        self._store = store if isinstance(store, LogStore) else LogStore(store)
        self._worker = BackgroundThread("logs", self._run_cycle)
        fork_safety.on_fork(self, "_reset_after_fork")
        try:
            self._ensure_topic()
            self._producer = self._store.producer(ack=ack, linger_ms=1000, tracing="off")
        except BaseException:
            self._close_store()
            raise
        _handlers.add(self)

    def _reset_after_fork(self) -> None:
        """Drop the buffered lines in a forked child, because the parent appends them."""
        self._pending, self._unsynced, self._producer = [], [], None
        self._reported_dropped = self._appending_thread = 0
        self._is_failing = self._is_unshipped = self._is_woken = False

    def createLock(self) -> None:
        """Set a lock that does nothing, because this handler needs no exclusion."""
        self.lock = _NoLock()  # type: ignore[assignment]

    # ------------------------------------------------------------ logging

    def emit(self, record: logging.LogRecord) -> None:
        """Render a record, and put it into the buffer for the thread."""
        is_own = threading.get_ident() == self._appending_thread
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
            except RuntimeError:  # too late in the life of the program: `flush` appends
                return
        if not self._is_woken and not self._is_failing:  # after a failure the thread retries by itself
            self._is_woken = True
            worker.wake()

    @property
    def dropped(self) -> int:
        """Number of dropped records of this process."""
        return self._buffer.dropped

    def flush(self) -> None:
        """Wait up to ``flush_ms`` until all records are appended."""
        self.flush_within(self._flush_s)

    def flush_within(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until all records are appended. Return whether they are."""
        if threading.get_ident() == self._appending_thread:
            return False
        if self._worker.is_running:
            self._worker.wake()
            return self._buffer.wait(timeout_s)
        ends_s = time.monotonic() + timeout_s
        while not self._buffer.is_empty and time.monotonic() < ends_s:
            pause_s = self._run_cycle()
            if not self._buffer.is_empty:
                time.sleep(max(min(pause_s, ends_s - time.monotonic()), 0.0))
        return self._buffer.is_empty

    flushed = flush_within  # its name until version 0.1

    def close(self) -> None:
        """Flush for up to ``flush_ms``, and drop all later records. Idempotent.

        Closes the store if the handler opened it.
        """
        if not self._closed_for_good:
            ends_s = time.monotonic() + self._flush_s
            self.flush_within(self._flush_s)
            self._closed_for_good = True
            if self._worker.is_running:
                self._worker.wake()  # the thread closes what may block; this call waits for it only until the limit
                self._worker.join(max(ends_s - time.monotonic(), 0.0) + 0.1)
            else:
                self._close_clients()
            left = self._buffer.count
            if left:
                self._buffer.drop(left)
                self._report_error(
                    f"{left} log records could not be appended within {self._flush_s} s and were dropped"
                )
            self._worker.ask_to_stop()
            _handlers.discard(self)
        super().close()

    # ------------------------------------------------------------ appending, in the thread

    def _run_cycle(self) -> float:
        """Append the buffered lines. Return the seconds until the next cycle."""
        with try_lock(self._append_lock) as is_free:
            if not is_free:  # `flush` found no thread, and then one started: both would append the same lines
                return _CHECK_S
            self._appending_thread = threading.get_ident()
            self._is_woken = False  # before the check: later records wake the thread again
            try:
                return self._append_all()
            finally:
                self._appending_thread = 0

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
                self._report_dropped()
        if self._closed_for_good:
            self._close_clients()
            self._worker.ask_to_stop()
        return _IDLE_S

    def _append(self, lines: list[Line]) -> int:
        """Append lines. Return the number of lines that ``ack`` counts as acknowledged; the others are retried."""
        from segmentlog.producing.producer import passed_at

        sent: list[tuple[Line, Any]] = []
        given_up: list[Line] = []
        first: Exception | None = None
        try:
            producer = self._open_producer()
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
                producer.flush()  # also after a send that raised the failure of earlier lines
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
        if isinstance(first, ShipUnconfirmed):  # the records are appended, and are shipped later
            first = None
        reached = len(sent) + len(given_up)
        again = failed + lines[reached:]
        if isinstance(first, StoreClosed) and self._path is None:
            given_up += again
            again = []
        self._pending = again  # first, so that no line is appended twice whatever happens afterwards
        self._unsynced = unsynced
        waiting = {id(line) for lines_left in (again, unsynced) for line in lines_left}
        self._buffer.drop(len(given_up))
        if unshipped is not None and not self._is_unshipped:
            self._report_error("log records are appended but not shipped", unshipped)
        self._is_unshipped = unshipped is not None
        if first is not None:
            self._handle_failure(first)  # before `done`, so that `flush` returns after the error was reported
        self._buffer.remove([line for line in lines if id(line) not in waiting])
        return len(lines) - len(waiting) - len(given_up)

    def _sync(self) -> int:
        """Fsync the lines that are appended but not durable. Return the number of fsynced lines."""
        if not self._unsynced:
            return 0
        try:
            self._open_producer()
            for partition in self._store.topic(self.topic).partitions():
                partition.flush()
        except (SegmentlogError, OSError) as error:
            self._handle_failure(error)
            if self._path is not None or not isinstance(error, StoreClosed):
                return 0
        lines, self._unsynced = self._unsynced, []
        self._buffer.remove(lines)
        return len(lines)

    def _open_producer(self) -> Producer:
        if self._producer is None:
            if self._store.is_closed and self._path is not None:
                # At exit, stores are closed before the last record is logged. Threads are not needed then.
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

    def _handle_failure(self, error: Exception) -> None:
        """Close the producer or the store if the error requires it: the next cycle opens it again.

        Report the first error of a series.
        """
        if isinstance(error, StoreClosed | PartitionFailed | UnknownTopic):
            producer, self._producer = self._producer, None
            if producer is not None:
                # no line waits in the producer: failed lines are in `_pending`
                with contextlib.suppress(SegmentlogError, OSError):
                    producer.close()  # otherwise its thread would run until a garbage collection
            if isinstance(error, PartitionFailed) and self._path is not None:
                self._close_store()  # reopening it runs a recovery
            if isinstance(error, StoreClosed) and self._path is not None:
                return  # at exit; it is opened again
        if not self._is_failing or isinstance(error, _OF_THE_RECORD):
            self._is_failing = not isinstance(error, _OF_THE_RECORD)
            self._report_error("log records cannot be appended", error)

    def _report_error(self, text: str, error: Exception | None = None) -> None:
        """Call `logging.Handler.handleError`; ignore its failure, which no other channel could report."""
        record = logging.LogRecord(
            "segmentlog.logs", logging.ERROR, __file__, 0, "topic %s: %s: %s", (self.topic, text, error or ""), None
        )
        try:
            raise error or SegmentlogError(text)
        except Exception:
            with contextlib.suppress(Exception):  # for example a closed stderr
                self.handleError(record)

    def _report_dropped(self) -> None:
        """Log a record that reports the number of dropped records."""
        count = self._buffer.dropped - self._reported_dropped
        if count:
            text = f"{count} earlier log records of this process were dropped: appending could not keep up"
            record = logging.LogRecord("segmentlog.logs", logging.WARNING, __file__, 0, text, None, None)
            record.dropped = count
            key = None
            with contextlib.suppress(Exception):  # the function may not accept this record
                key = self._key_of(record)
            created_ms = int(record.created * 1000)
            line = Line(render(record, text, self._static), key, (), created_ms, created_ms)
            if self._buffer.put(line, 0.0):
                self._reported_dropped += count

    def _close_clients(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.close()
            except (SegmentlogError, OSError) as error:
                self._handle_failure(error)
        self._close_store()

    def _close_store(self) -> None:
        if self._path is not None:
            try:
                self._store.close()
            except (SegmentlogError, OSError) as error:
                self._report_error("the store was not closed cleanly", error)


_handlers: weakref.WeakSet[LogHandler] = weakref.WeakSet()


@atexit.register
def _flush_handlers() -> None:
    """Flush at exit before stores are closed, which happens before `logging.shutdown`."""
    for handler in members_of(_handlers):
        handler.flush()
