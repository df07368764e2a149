"""The handler for Python's logging: the content of records, which calls wait, and records that cannot be appended."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import logging.config
import logging.handlers
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from full_disk import FullDisk
from logs import contents, values

import segmentlog
from segmentlog.errors import InvalidConfig, UnknownTopic
from segmentlog.logs.handler import LogHandler
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Yield a logger that has no handlers before and after the test."""
    logger = logging.getLogger("app.web")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def _rows(store: LogStore | Path, topic: str = "logs") -> list[dict[str, Any]]:
    if isinstance(store, LogStore):
        return [json.loads(value or b"") for log in store.topic(topic).partitions() for value in values(log)]
    with segmentlog.open(store) as opened:
        return _rows(opened, topic)


def test_what_a_record_has(tmp_path: Path, logger: logging.Logger) -> None:
    """Time, level, logger, message with its arguments, exception, stack, process, thread, extra and static fields."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store, static={"service": "shop"}))
        before = time.time()
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("user %s: %d", "Ann", 3, extra={"request": {"id": 7}, "time": "odd"}, stack_info=True)
        logger.info("plain")
        handler.flush()
        row, plain = _rows(store)
        (kept, _) = contents(store.topic("logs").partition(0))
    assert before - 1 < datetime.fromisoformat(row["time"]).timestamp() < time.time() + 1
    assert (row["level"], row["logger"], row["message"]) == ("ERROR", "app.web", "user Ann: 3")
    assert (row["process"], row["thread"], row["service"]) == (os.getpid(), "MainThread", "shop")
    assert row["request"] == {"id": 7}
    assert row["extra.time"] == "odd"
    assert row["exc_info"].startswith("Traceback")
    assert row["exc_info"].endswith("ValueError: no")
    assert "test_what_a_record_has" in row["stack"]
    assert row["file"] == __file__
    assert not {"exc_info", "stack", "request"} & plain.keys()
    assert kept.key is None


class _Untold:
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_what_json_has_not_is_a_text(tmp_path: Path, logger: logging.Logger) -> None:
    """A value that JSON cannot express becomes a text, and its record is not lost."""
    circle: list[Any] = []
    circle.append(circle)
    odd = {
        "path": Path("/tmp"), "bytes": b"a\xff", "half": "\ud800", "big": 1 << 80, "circle": circle,
        "nan": float("nan"), "untold": _Untold(), "keys": {(1, 2): 3}, "set": {1}, "cls": int,
    }  # fmt: skip
    with segmentlog.open(tmp_path / "s") as store:
        handler = LogHandler(store)
        for extra in (odd, *({name: value} for name, value in odd.items())):
            # Called directly: pytest's own handler cannot write all of these.
            handler.handle(
                logger.makeRecord("app.web", logging.INFO, __file__, 1, "odd %s", ("\ud800",), None, extra=extra)
            )
        handler.close()
        rows = _rows(store)
    assert len(rows) == 1 + len(odd)
    row = rows[0]
    assert row["message"] == "odd \\ud800"
    assert (row["path"], row["bytes"], row["half"], row["cls"]) == ("/tmp", "a\\xff", "\\ud800", "<class 'int'>")
    assert row["untold"] == "<_Untold without a text: ZeroDivisionError>"
    assert int(row["big"]) == 1 << 80
    assert row["circle"] == "[[...]]"


def test_keys_headers_and_levels(tmp_path: Path, logger: logging.Logger) -> None:
    """Each option has its effect; a missing topic is created with them."""
    with segmentlog.open(tmp_path / "s") as store:
        handler = LogHandler(
            store, "app", logging.WARNING, key="logger", headers=lambda record: {"level": record.levelname},
            partitions=3, config={"retention.ms": 1000}, ack="durable",
        )  # fmt: skip
        logger.addHandler(handler)
        logger.info("too low")
        logger.warning("high")
        assert handler.flush_within(10)
        (log,) = [log for log in store.topic("app").partitions() if log.log_end_offset]
        assert log.durable_offset == 1
        (kept,) = contents(log)
        assert (kept.key, kept.headers) == (b"app.web", (("level", b"WARNING"),))
        assert store.topic("app").config.retention_ms == 1000
        with pytest.raises(UnknownTopic):
            LogHandler(store, "other", create_topic=False)
        for options in ({"key": "name"}, {"headers": 3}, {"block_ms": -1}, {"static": 3}, {"ack": "soon"}):
            with pytest.raises(InvalidConfig):
                LogHandler(store, **options)  # type: ignore[arg-type]


def test_a_dead_disk_blocks_nobody_for_long(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call waits for as long as it says, later calls do not; dropped records are counted and reported later."""
    fs = FaultyFileSystem()
    go = threading.Event()
    waits: dict[int, float] = {}
    number = -1

    def sleep(seconds: float) -> None:
        waits[number] = waits.get(number, 0) + seconds
        time.sleep(seconds)

    monkeypatch.setattr("segmentlog.logs.buffer.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with LogStore(tmp_path / "s", fs=fs, background=False) as store:
        handler = LogHandler(store, buffer_bytes=20_000, block_ms=200, flush_ms=300)
        logger.addHandler(handler)
        logger.info("first")
        handler.flush()
        fs.before("pwritev", lambda: go.wait(120))  # a call that waited for the disk would wait that long
        for number in range(300):
            logger.info("number %d", number)
        (waited_s,) = waits.values()
        assert waited_s < 0.201
        assert not handler.flush_within(0.3)
        dropped = handler.dropped
        assert 100 < dropped < 300
        go.set()
        assert handler.flush_within(20)
        logger.info("last")
        assert handler.flush_within(20)
        rows = _rows(store)
    numbers = [row["message"] for row in rows if row["message"].startswith("number")]
    assert numbers == [f"number {number}" for number in range(300 - dropped)]
    assert [row["dropped"] for row in rows if "dropped" in row] == [dropped]
    assert rows[-1]["message"] == "last" or "dropped" in rows[-1]
    assert capsys.readouterr().err == ""


def test_a_close_on_a_dead_disk_comes_to_an_end(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """It returns while the disk still hangs, and reports how many records are missing."""
    fs = FaultyFileSystem()
    go = threading.Event()
    with LogStore(tmp_path / "s", fs=fs, background=False) as store:
        handler = LogHandler(store, flush_ms=200)
        logger.addHandler(handler)
        fs.before("pwritev", lambda: go.wait(120))  # longer than the close may wait
        logger.info("stuck")
        handler.close()
        assert not go.is_set()
        assert handler.dropped == 1
        assert "1 log records could not be appended within 0.2 s" in capsys.readouterr().err
        logger.info("too late")
        assert handler.dropped == 2
        go.set()
        handler._worker.join(10)


def test_a_full_disk(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that were logged while the disk was full are appended once there is room; stderr gets one message."""
    disk = FullDisk(monkeypatch.setattr, str(tmp_path))
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store, config={"segment.bytes": 1 << 20}))
        logger.info("before")
        assert handler.flush_within(10)
        disk.is_full = True
        noise = os.urandom(200_000).hex()
        for number in range(6):
            logger.info("while %d", number, extra={"noise": noise})
        assert not handler.flush_within(0.4)
        assert disk.refused
        disk.is_full = False
        assert handler.flush_within(20)
        assert [row["message"] for row in _rows(store)] == ["before", *(f"while {n}" for n in range(6))]
    error = capsys.readouterr().err
    assert error.count("Logging error") == 1
    assert "log records cannot be appended" in error


@pytest.mark.parametrize("key", [None, "logger"])
@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("method", ["pwritev", "stat"])
def test_a_chunk_that_fails_keeps_later_lines_back(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str], call: int, key: Any, method: str
) -> None:
    """A write finds no room, or the topic's file cannot be read, and the next call would succeed.

    Each partition has every line once, in order.
    """
    fs = FaultyFileSystem()
    with LogStore(tmp_path / "s", fs=fs, background=False) as store:
        logger.addHandler(handler := LogHandler(store, partitions=2, key=key))
        loggers = [logger.getChild(name) for name in "abc"]
        noise = os.urandom(50_000).hex()
        for number in range(4):  # one line a chunk: the files of each partition are there afterwards
            loggers[number % 3].info("before %d", number, extra={"noise": noise})
            assert handler.flush_within(10)
        fs.fail(method, errno.ENOSPC if method == "pwritev" else errno.EIO, call=call)
        with handler._append_lock:  # the thread waits: one flush gets all of them
            for number in range(10):  # two or three a chunk
                loggers[number % 3].info("%02d", number, extra={"noise": noise})
        assert handler.flush_within(20)
        assert handler.dropped == 0
        found = [
            [message for value in values(log) if "before" not in (message := json.loads(value or b"")["message"])]
            for log in store.topic("logs").partitions()
        ]
    assert sorted(message for messages in found for message in messages) == [f"{number:02d}" for number in range(10)]
    assert found == [sorted(messages) for messages in found]
    assert capsys.readouterr().err.count("Logging error") == 1


def test_lines_after_a_refused_chunk_are_not_taken_for_refused(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit falls while lines are on their way: the line that is too large now is dropped, and no other."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        logger.addHandler(handler := LogHandler(store))
        assert handler._producer is not None
        send, sent = handler._producer.send, []

        def send_and_lower(*args: Any, **options: Any) -> Any:
            sent.append(args)
            delivery = send(*args, **options)
            if len(sent) == 2:
                store.alter_topic("logs", max_message_bytes=100_000)
            return delivery

        handler._producer.send = send_and_lower  # type: ignore[method-assign]
        with handler._append_lock:
            for number, size in enumerate((10, 60_000, 10, 90_000, 10)):
                logger.info("%d", number, extra={"noise": os.urandom(size).hex()})
        assert handler.flush_within(20)
        rows = _rows(store)
    assert [row["message"] for row in rows if "dropped" not in row] == ["0", "2", "4"]
    assert handler.dropped == 2
    assert "takes" in capsys.readouterr().err


def test_who_flushes_and_the_thread_append_nothing_twice(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread exists, a flush does its work; the thread may start during that."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store))
        real, is_there, go_on = handler._append, threading.Event(), threading.Event()

        def append(lines: Any) -> int:
            if not is_there.is_set():
                is_there.set()
                assert go_on.wait(10)
            return real(lines)

        monkeypatch.setattr(handler, "_append", append)
        with monkeypatch.context() as patch:
            patch.setattr(handler._worker, "ensure_running", lambda: None)
            logger.info("once")
        flushing = threading.Thread(target=handler.flush_within, args=(10,))
        flushing.start()
        assert is_there.wait(10)
        handler._run_cycle()  # as the thread that has begun by now
        go_on.set()
        flushing.join(10)
        assert handler.flush_within(10)
        assert [row["message"] for row in _rows(store)] == ["once"]


def test_what_is_not_shipped_is_appended_once(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is on the local disk and ships later; a retry would append it again. Stderr gets one message."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store, ack="shipped"))
        for number in range(3):
            logger.info("%d", number)
            assert handler.flush_within(10)
        assert [row["message"] for row in _rows(store)] == ["0", "1", "2"]
        assert handler.dropped == 0
    error = capsys.readouterr().err
    assert error.count("Logging error") == 1
    assert "no process ships this store" in error


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES])
def test_what_cannot_be_synced_is_appended_once(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str], error: int
) -> None:
    """The process may not open a file, whichever file of an append or fsync it is: no record is appended twice.

    The handler counts as flushed only once its records are on disk.
    """
    unsynced, most = 0, 9
    for call in range(1, most + 1):
        fs = FaultyFileSystem()
        with LogStore(tmp_path / f"{call}", fs=fs, background=False) as store:
            store.create_topic("logs")
            # A file that changed a moment ago is read again and again, and call 6 would not be the one for the fsync.
            os.utime(tmp_path / f"{call}" / "logs" / "topic.json", (1, 1))
            logger.addHandler(handler := LogHandler(store, ack="durable"))
            logger.info("before")
            assert handler.flush_within(10)
            log = store.topic("logs").partition(0)
            log.handle.close_files()  # as for an idle partition
            before = len(fs.calls)
            fs.fail("open", error, call=call, times=2)
            logger.info("once")
            assert handler.flush_within(20)
            tried = sum(name == "open" for name, _ in fs.calls[before:])
            fs.heal()
            assert log.durable_offset == log.log_end_offset
            assert [row["message"] for row in _rows(store)] == ["before", "once"], f"call {call}"
            logger.removeHandler(handler)
            handler.close()
        unsynced += "the records are appended, but may not be on the disk" in capsys.readouterr().err
    assert tried < most
    assert unsynced


def test_a_record_that_is_too_large_is_dropped_alone(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record is counted and reported on stderr; its neighbours are appended."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store, config={"max.message.bytes": 20_000}))
        logger.info("a")
        logger.info("x" * 30_000)
        logger.info("b")
        assert handler.flush_within(10)
        assert handler.flush_within(10)
        rows = _rows(store)
        assert handler.dropped == 1
    assert [row["message"] for row in rows if "dropped" not in row] == ["a", "b"]
    assert "takes" in capsys.readouterr().err


def test_a_record_that_no_log_takes_is_dropped_alone(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key, a header or a time that a record cannot have, be it of one record: its neighbours are appended."""

    def key(record: logging.LogRecord) -> Any:
        return {"number": 5, "none": None}.get(str(record.msg), "k")

    def headers(record: logging.LogRecord) -> dict[str, str]:
        return {"\ud800": "x"} if record.msg == "header" else {}

    def before_1970(record: logging.LogRecord) -> bool:
        record.created = -5.0 if record.msg == "time" else record.created
        return True

    with segmentlog.open(tmp_path / "s") as store:
        handler = LogHandler(store, config={"cleanup.policy": "compact"}, key=key, headers=headers)
        handler.addFilter(before_1970)
        logger.addHandler(handler)
        for message in ("a", "number", "b", "none", "c", "header", "d", "time", "e"):
            logger.info(message)
        assert handler.flush_within(10)
        assert handler.flush_within(10)
        rows = _rows(store)
        assert handler.dropped == 3
    assert [row["message"] for row in rows if "dropped" not in row] == ["a", "b", "c", "d", "time", "e"]
    assert "expected" in capsys.readouterr().err


def test_an_error_that_cannot_be_told_appends_nothing_twice(
    tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stderr that is closed, say: what it is about is over and done."""

    def refuse(handler: LogHandler, record: logging.LogRecord) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(LogHandler, "handleError", refuse)
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store, config={"max.message.bytes": 20_000}))
        for number in range(3):
            logger.info("a%d", number)
            logger.info("x" * 30_000)
            assert handler.flush_within(10)
        assert handler.flush_within(10)
        rows = _rows(store)
        assert handler.dropped == 3
        assert handler._buffer.count == 0
    assert [row["message"] for row in rows if "dropped" not in row] == ["a0", "a1", "a2"]


def test_what_segmentlog_logs_itself_does_not_go_round(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """A handler on the root, for everything, on a disk that fails: no recursion, and other threads of it are heard."""
    fs = FaultyFileSystem()
    root = logging.getLogger()
    before = root.level
    with LogStore(tmp_path / "s", fs=fs) as store:
        handler = LogHandler(store)
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        try:
            fs.fail("pwritev", errno.EIO, times=3)
            logging.getLogger("other").info("one")
            logging.getLogger("segmentlog").warning("from another thread")
            assert handler.flush_within(20)
        finally:
            root.removeHandler(handler)
            root.setLevel(before)
            handler.close()
        messages = [row["message"] for row in _rows(store)]
    assert messages.count("one") == 1
    assert "from another thread" in messages
    assert "Logging error" in capsys.readouterr().err


def test_a_store_that_is_closed(tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """The handler does not reopen a store that was passed to it: it drops records, and stderr gets one message."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store))
    for _ in range(3):
        logger.info("nowhere")
        assert handler.flush_within(10)
    assert handler.dropped == 3
    assert capsys.readouterr().err.count("Logging error") == 1


def test_a_topic_that_is_deleted_is_made_anew(tmp_path: Path, logger: logging.Logger) -> None:
    """The next line recreates the topic, and later lines follow it."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store))
        logger.info("old")
        assert handler.flush_within(10)
        store.delete_topic("logs")
        logger.info("new")
        assert handler.flush_within(10)
        assert [row["message"] for row in _rows(store)] == ["new"]


def test_errors_of_a_record_are_logging_s_own(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """For wrong arguments or a key function that raises, the handler calls `handleError`, and the program continues."""

    def key(record: logging.LogRecord) -> str:
        return str(1 // len(record.args or ()))

    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store, key=key))
        for text, arguments in (("%d", ("x",)), ("no arguments", ()), ("%s", ("fine",))):
            # Called directly: pytest's own handler raises.
            handler.handle(logger.makeRecord("app.web", logging.INFO, __file__, 1, text, arguments, None))
        handler.flush()
        assert [row["message"] for row in _rows(store)] == ["fine"]
    error = capsys.readouterr().err
    assert "TypeError" in error
    assert "ZeroDivisionError" in error


def test_dict_config_and_queue_handler(tmp_path: Path) -> None:
    """Made of words alone, beside the standard library's way to log from a thread."""
    handlers: dict[str, Any] = {
        "store": {
            "class": "segmentlog.LogHandler", "store": str(tmp_path / "s"), "topic": "app", "level": "INFO",
            "formatter": "short", "static": {"service": "x"},
        },
    }  # fmt: skip
    logging.config.dictConfig({
        "version": 1, "disable_existing_loggers": False, "handlers": handlers,
        "formatters": {"short": {"format": "%(name)s: %(message)s"}},
        "loggers": {"configured": {"handlers": ["store"], "level": "DEBUG", "propagate": False}},
    })  # fmt: skip
    logger = logging.getLogger("configured")
    (handler,) = logger.handlers
    assert isinstance(handler, LogHandler)
    logger.debug("low")
    logger.info("high")
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    logger.handlers = [logging.handlers.QueueHandler(lines)]
    listener = logging.handlers.QueueListener(lines, handler)
    listener.start()
    try:
        1 // 0  # noqa: B018
    except ZeroDivisionError:
        logger.exception("by a queue")
    listener.stop()
    logger.handlers = []
    handler.close()
    high, queued = _rows(tmp_path / "s", "app")
    assert (high["message"], high["service"]) == ("high", "x")
    assert "ZeroDivisionError" in queued["message"]


def test_a_forked_child_logs_for_itself(tmp_path: Path, logger: logging.Logger) -> None:
    """Its parent's records are not appended twice, and its own are there."""
    with segmentlog.open(tmp_path / "s") as store:
        logger.addHandler(handler := LogHandler(store))
        for number in range(200):
            logger.info("parent %d", number)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                logger.info("child")
                code = 0 if handler.flush_within(20) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert handler.flush_within(20)
        rows = _rows(store)
    assert [row["message"] for row in rows if row["process"] == os.getpid()] == [f"parent {n}" for n in range(200)]
    assert [row["message"] for row in rows if row["process"] == pid] == ["child"]


_PROGRAM = """
import atexit, logging, sys
atexit.register(lambda: logging.getLogger("late").warning("at exit %s", sys.argv[2]))
import segmentlog
logging.basicConfig(level=logging.INFO, handlers=[segmentlog.LogHandler(sys.argv[1], static={"who": sys.argv[2]})])
for number in range(int(sys.argv[3])):
    logging.info("%d", number)
if len(sys.argv) > 4:
    logging.getLogger().handlers[0].flush()
    print("flushed", flush=True)
    while True:
        logging.info("more")
"""


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _PROGRAM, str(folder), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_many_processes_and_a_kill(tmp_path: Path) -> None:
    """All lines of each process are stored in order, up to the last; a killed process does not disturb the others."""
    folder = tmp_path / "s"
    with contextlib.ExitStack() as kills:  # otherwise a failed test leaves processes that log forever

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = _start(folder, *arguments)
            kills.callback(process.kill)
            return process

        killed = start("killed", "50", "on")
        assert killed.stdout is not None
        assert killed.stdout.readline() == "flushed\n"
        others = [start(f"p{number}", "300") for number in range(3)]
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        for process in others:
            _, error = process.communicate(timeout=60)
            assert (process.returncode, error) == (0, "")
    rows = _rows(folder)
    for number in range(3):
        messages = [row["message"] for row in rows if row["who"] == f"p{number}"]
        assert messages == [*map(str, range(300)), f"at exit p{number}"]
    of_killed = [row["message"] for row in rows if row["who"] == "killed"]
    assert of_killed[:50] == [*map(str, range(50))]
    assert set(of_killed[50:]) <= {"more"}
