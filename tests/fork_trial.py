"""Forks of a process while one of its threads is stopped at a chosen point.

A point is a lock before it is acquired, just acquired, or before it is released; or a call of the `FileSystem` before
or after it runs ("calls"). It may also be an instruction of the package's own code ("instructions").

The child and the parent must both work after the fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import segmentlog
from segmentlog import StoreClosed
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import METHODS

PACKAGE = os.path.dirname(segmentlog.__file__) + os.sep
LIMIT_S = 20.0
"""Limit for a child. It needs a tenth of a second, more on a busy machine, unless it hangs."""
_FORK_S = 0.1
"""A fork waits while a file is being opened: after this time the stopped thread continues before the fork."""


class Stopper:
    """Counts the points that one thread comes to, and stops it at one of them."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind = kind
        self.at = at
        self.count = 0
        self.where = ""
        self.stopped, self.go = threading.Event(), threading.Event()
        self._thread = -1

    def run(self, work: Callable[[], object]) -> None:
        """Do the work in this thread and count its points."""
        self._thread = threading.get_ident()
        measuring = sys.gettrace()
        if self.kind == "instructions":
            sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(measuring)
            self._thread = -1

    def forget(self) -> None:
        """Stop counting, in a child: one of its threads may get the number of the stopped thread."""
        self._thread = -1

    def at_call(self, what: str) -> None:
        if self.kind == "calls":
            self._reach(what)

    def _reach(self, what: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self.count += 1
        if self.count == self.at:
            self.where = what if self.kind == "instructions" else f"{what} {_caller()}"
            self.stopped.set()
            self.go.wait(2 * LIMIT_S)

    def _trace(self, frame: Any, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._reach(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} op {frame.f_lasti}")
        return self._trace


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"


current = Stopper("none", 0)


class WatchedLock:
    """A lock that reports its use to the stopper."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def acquire(self, *args: Any, **options: Any) -> bool:
        current.at_call("before acquire")
        taken: bool = self._real.acquire(*args, **options)
        current.at_call("after acquire")
        return taken

    def release(self) -> None:
        current.at_call("before release")
        self._real.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class WatchedFiles(FileSystem):
    """The real file system, which reports its calls to the stopper."""

    def __init__(self) -> None:
        for name in METHODS:
            setattr(self, name, self._watched(name, getattr(self, name)))

    @staticmethod
    def _watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            current.at_call(f"before {name}")
            result = real(*args, **options)
            current.at_call(f"after {name}")
            return result

        return call


@contextlib.contextmanager
def watched_locks() -> Iterator[None]:
    """Make every lock that is created within report to the stopper."""
    made = fork_safety._make_lock, fork_safety._make_reentrant_lock
    fork_safety._make_lock = lambda: WatchedLock(threading.Lock())  # type: ignore[assignment,return-value]
    fork_safety._make_reentrant_lock = lambda: WatchedLock(threading.RLock())  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        fork_safety._make_lock, fork_safety._make_reentrant_lock = made


# ---------------------------------------------------------------- what parent and child work on


class Scene:
    """An open store and the objects of it that a program may have when it forks."""

    def __init__(self, path: Path, number: int, *, background: bool = False) -> None:
        self.path = path
        self.number = number
        self.acked: list[bytes] = []
        """Values that were acknowledged to the parent in topic ``t``: each exists once."""
        self.store = LogStore(path, background=background, fs=WatchedFiles(), scrub_bytes_per_s=1 << 20)
        store = self.store
        self.log = store.topic("t").partition(0)
        self.compacted = store.topic("k").partition(0)
        self.append(b"first")
        self.reader = store.consumer("t", start=self.log.log_end_offset - 1, follow=True)
        self.rest = iter(self.reader)
        self.reader._follower.wait(None)  # a record exists, so this only opens the wakeup, and does not wait
        next(self.rest)
        self.member = store.consumer("t", group="parent", auto_offset_reset="latest")
        self.member.poll_group()
        self.named = store.producer(name="etl", linger_ms=0)
        self.named.send("t", self.value(b"named"), partition=0).result()
        self.acked.append(self.value(b"named"))
        self.producer = store.producer(linger_ms=3_600_000)
        self.unsent = self.producer.send("t", self.value(b"unsent"), partition=0)
        self.table = store.table("k")

    def value(self, what: bytes) -> bytes:
        return b"%s %d" % (what, self.number)

    def append(self, what: bytes, ack: Any = None) -> None:
        self.log.append([self.value(what)], ack=ack)
        self.acked.append(self.value(what))

    def close(self) -> None:
        """Close the scene as its parent, and send the remaining records."""
        self.producer.close()
        self.acked.append(self.value(b"unsent"))
        for one in (self.named, self.member, self.reader, self.store):
            one.close()


def prepare(path: Path) -> None:
    """Create the store that scenes open."""
    with segmentlog.open(path, background=False) as store:
        store.create_topic("t", segment_records=40, fsync="never", index_interval_bytes=64)
        store.create_topic("k", cleanup_policy="compact", segment_records=4, fsync="never")
        store.create_topic("r", fsync="never")
        keys = [b"%d" % (number % 3) for number in range(12)]
        store.topic("k").partition(0).append(keys, keys)


def _two_at_once(scene: Scene) -> None:
    other = threading.Thread(target=lambda: scene.append(b"other", "durable"))
    other.start()
    scene.append(b"one", "durable")
    other.join()


def _transaction(scene: Scene) -> None:
    with scene.named.transaction():
        scene.named.send("t", scene.value(b"in a transaction"), partition=0)
    scene.acked.append(scene.value(b"in a transaction"))


def _send(scene: Scene) -> None:
    with scene.store.producer(linger_ms=0) as producer:
        producer.send("t", scene.value(b"sent"), partition=0).result()
        scene.acked.append(scene.value(b"sent"))
        producer.send_many("t", [scene.value(b"sent 1"), scene.value(b"sent 2")], partition=0)
        scene.acked += [scene.value(b"sent 1"), scene.value(b"sent 2")]


def _compact(scene: Scene) -> None:
    scene.compacted.append([b"x"], [b"%d" % scene.number])
    scene.compacted.roll()
    scene.compacted.compact()


def _read(scene: Scene) -> None:
    start = max(scene.log.log_end_offset - 90, scene.log.log_start_offset)
    sum(len(batch.values) for batch in scene.log.read(start))
    scene.log.offset_for_timestamp(1)
    list(scene.log.read(start, isolation="read_committed"))


def _group(scene: Scene) -> None:
    with scene.store.consumer("t", group="other", auto_offset_reset="latest") as member:
        member.poll_group()
        member.commit({("t", 0): 1})
        member.commit_async()


def _administer(scene: Scene) -> None:
    name = f"made-{scene.number}"
    scene.store.create_topic(name, partitions=2)
    scene.store.topic(name).partition(0).append([b"x"])
    scene.store.alter_topic(name, retention_ms=1_000_000)
    scene.store.rename_topic(name, f"{name}-again")
    scene.store.delete_topic(f"{name}-again")


def _tick(scene: Scene) -> None:
    scene.store.flush_tick()
    scene.store.retention_tick()
    scene.store.scrub_tick()
    scene.store.finish_transactions()


def _open_and_close(scene: Scene) -> None:
    with LogStore(scene.path, background=False, fs=WatchedFiles()) as store:
        store.topic("t").partition(0).append([scene.value(b"elsewhere")])
    scene.acked.append(scene.value(b"elsewhere"))


def _change(scene: Scene) -> None:
    log = scene.store.topic("r").partition(0)
    offset = log.append([b"x"] * 9)
    log.roll()
    log.append([b"y"] * 9)
    log.trim(offset)
    log.truncate(log.log_end_offset - 2)
    log.flush()


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "append": lambda scene: scene.append(b"appended"),
    "durable append": lambda scene: scene.append(b"durable", "durable"),
    "group commit": _two_at_once,
    "read": _read,
    "follow": lambda scene: (scene.append(b"followed"), next(scene.rest), scene.reader._follower.watch.drain()),
    "send": _send,
    "flush": lambda scene: scene.producer.flush(),
    "transaction": _transaction,
    "group": _group,
    "poll and commit": lambda scene: (scene.member.poll_group(), scene.member.commit({("t", 0): 1})),
    "administer": _administer,
    "compact": _compact,
    "ticks": _tick,
    "table": lambda scene: (scene.compacted.append([b"y"], [b"1"]), scene.table.refresh(), scene.table[b"1"]),
    "roll, trim, truncate": _change,
    "open and close": _open_and_close,
    "close": lambda scene: scene.close(),
}


# ---------------------------------------------------------------- the child


def child_works(scene: Scene, tell: Callable[[str], None]) -> None:
    """Do each kind of work with the objects that the child inherited."""
    store, log = scene.store, scene.log
    if store._topics.is_closed:  # the fork came while the parent closed the store
        store = segmentlog.open(scene.path, background=False)
        log = store.topic("t").partition(0)
    tell("append")
    offset = log.append([b"of a child"])
    tell("durable append")
    log.append([b"of a child"], ack="durable")
    tell("group commit")
    others = [threading.Thread(target=log.append, args=([b"of a child"],), kwargs={"ack": "durable"}) for _ in range(2)]
    for other in others:
        other.start()
    log.append([b"of a child"], ack="durable")
    for other in others:
        other.join()
    tell("read")
    assert next(log.read(offset)).values[0] == b"of a child"
    log.offset_for_timestamp(1)
    assert log.durable_offset > offset
    if not scene.reader._follower.is_closed and not scene.store._topics.is_closed:
        tell("consume")
        scene.reader.seek("t", 0, "latest")
        later = threading.Timer(0.01, log.append, args=([b"of a child, later"],))
        later.start()
        assert any(record.value == b"of a child, later" for record in scene.reader)
        later.join()
        tell("table")
        scene.table.refresh()
        assert scene.table[b"0"]
    tell("producers")
    _refused(lambda: scene.named.send("t", b"not mine", partition=0).result(1))
    if not scene.unsent.done():
        _refused(lambda: scene.unsent.result(1))
    if not scene.producer._accumulator.is_closed:
        with contextlib.suppress(StoreClosed):  # closed with the store, by a thread of the parent
            scene.producer.send("t", b"of a child", partition=0)
            scene.producer.flush()
        scene.producer.close()
    with contextlib.suppress(StoreClosed):  # repeat the result of the send
        scene.named.close()
    tell("transaction")
    with store.producer() as producer, producer.transaction():
        producer.send("t", b"of a child", partition=0)
    tell("group")
    _refused(lambda: scene.member.commit({("t", 0): 1}))
    with store.consumer("t", group="child", auto_offset_reset="latest") as member:
        member.poll_group()
        member.commit({("t", 0): 1})
    tell("create topic")
    name = f"of-{os.getpid()}"
    store.create_topic(name)
    store.delete_topic(name)
    tell("compact")
    store.topic("k").partition(0).compact(wait_s=LIMIT_S / 4)  # a busy parent compacts all the time
    tell("ticks")
    store.flush_tick()
    store.retention_tick()
    with contextlib.suppress(segmentlog.InvalidConfig):
        store.scrub_tick()
    store.health()
    tell("close")
    store.close()


def _refused(act: Callable[[], object]) -> None:
    try:
        act()
    except StoreClosed:
        return
    raise AssertionError("the child went on as the parent")


def _child(scene: Scene, told: int, may_end: int, of_parent: tuple[int, ...], report: str) -> None:
    """Run a child from fork to exit; this function never returns."""
    code = 1
    try:
        current.forget()
        for fd in of_parent:
            os.close(fd)
        with open(report, "w", buffering=1) as file:
            faulthandler.register(signal.SIGUSR1, file=file)  # the test asks a child that hangs for its stacks
            began_s = time.monotonic()

            def tell(what: str) -> None:
                file.write(f"{time.monotonic() - began_s:.3f} s: {what}\n")

            try:
                child_works(scene, tell)
            except BaseException:
                import traceback

                traceback.print_exc(file=file)
                os.write(told, b"failed")
                return
            faulthandler.unregister(signal.SIGUSR1)
            os.write(told, json.dumps(time.monotonic() - began_s).encode())
            select.select([may_end], [], [], 3 * LIMIT_S)
            code = 0
    finally:
        os._exit(code)


# ---------------------------------------------------------------- a trial


class Trial:
    """Result of one trial: ``reached`` says whether the point exists, ``problem`` describes a failure."""

    def __init__(self) -> None:
        self.reached = False
        self.points = 0
        self.where = self.problem = ""
        self.waited = False
        self.child_s = 0.0


def locked_files(path: Path) -> list[str]:
    """Return the files and folders of a store on which any process holds a lock.

    It opens descriptors of its own, so locks of this process count, too.
    """
    found = []
    for place in [path, *path.rglob("*")]:
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(str(place.relative_to(path)))
        finally:
            os.close(fd)
    return found


_counter = itertools.count()


def try_point(
    path: Path, operation: str, kind: str, at: int, *, by_multiprocessing: bool = False
) -> tuple[Trial, Scene]:
    """Stop the operation at its ``at``-th point (0: count the points), fork, and check child and parent."""
    global current
    trial, stopper = Trial(), Stopper(kind, at)
    current = Stopper("none", 0)
    scene = Scene(path, next(_counter))
    current = stopper
    failed: list[BaseException] = []

    def work() -> None:
        try:
            stopper.run(lambda: OPERATIONS[operation](scene))
        except BaseException as error:
            failed.append(error)
        finally:
            stopper.stopped.set()

    thread = threading.Thread(target=work, name="stopped", daemon=True)
    thread.start()
    assert stopper.stopped.wait(LIMIT_S), f"{operation}: the parent alone hangs"
    trial.reached, trial.where = bool(stopper.where), stopper.where
    if not trial.reached:
        thread.join()
        trial.points = stopper.count
        if operation != "close":
            scene.close()
        if failed:
            raise failed[0]
        return trial, scene
    told_read, told = os.pipe()
    may_end, may_end_write = os.pipe()
    of_parent = (told_read, may_end_write)
    report = str(path.parent / "report")
    # A fork may wait for the stopped thread: then that thread continues first.
    unstop = threading.Timer(_FORK_S, stopper.go.set)
    unstop.start()
    process: Any = None
    if by_multiprocessing:
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(scene, told, may_end, of_parent, report)
        )
        process.start()
        child = process.pid
    else:
        child = os.fork()
        if not child:
            _child(scene, told, may_end, of_parent, report)
    trial.waited = stopper.go.is_set()
    unstop.cancel()
    stopper.go.set()
    os.close(told)
    os.close(may_end)
    try:
        trial.problem = _parent(scene, operation, thread, failed)
        child_problem, trial.child_s = _what_became_of(child, told_read, report)
        if not trial.problem:
            if operation != "close":
                scene.close()
            locked = locked_files(path)
            if locked:
                trial.problem = f"after the parent closed, a child holds the locks of {locked}"
        trial.problem += child_problem
    finally:
        os.close(may_end_write)
        os.close(told_read)
        if trial.problem:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if process is not None:
            process.join()
        else:
            os.waitpid(child, 0)
    return trial, scene


def _what_became_of(child: int, told: int, report: str) -> tuple[str, float]:
    """Return (problem of a child, seconds that its work took)."""
    ready, _, _ = select.select([told], [], [], LIMIT_S)
    answer = os.read(told, 1 << 10) if ready else b""
    if answer and answer != b"failed":
        return "", json.loads(answer)
    if not answer:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGUSR1)  # print the stacks of child and parent
        time.sleep(0.5)
        with open(report, "a") as file:
            file.write("\nthe parent:\n")
            file.flush()
            faulthandler.dump_traceback(file)
    text = Path(report).read_text() if os.path.exists(report) else ""
    return f"\nthe child {'failed' if answer else 'hangs'}:\n{text}", 0.0


def _parent(scene: Scene, operation: str, thread: threading.Thread, failed: list[BaseException]) -> str:
    """Let the parent continue, and return its problem or ""."""
    thread.join(LIMIT_S)
    if thread.is_alive():
        return "the parent's thread does not go on"
    if failed:
        return f"the parent's work failed: {failed[0]!r}"
    if operation != "close":
        scene.append(b"after", "durable")
        OPERATIONS[operation](scene) if operation in ("append", "read", "ticks", "table") else None
    return ""


def try_busy(path: Path, forks: int) -> str:
    """Fork while threads of the parent and its background work run; return the problem or ""."""
    scene = Scene(path, next(_counter), background=True)
    ended = threading.Event()
    failed: list[BaseException] = []

    def keep_at(operation: str) -> None:
        try:
            while not ended.is_set():
                OPERATIONS[operation](scene)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=keep_at, args=(one,)) for one in ("group commit", "read", "table", "ticks")]
    for thread in threads:
        thread.start()
    problem = ""
    report = str(path.parent / "report")
    for _ in range(forks):
        told_read, told = os.pipe()
        may_end, may_end_write = os.pipe()
        child = os.fork()
        if not child:
            _child(scene, told, may_end, (told_read, may_end_write), report)
        os.close(told)
        os.close(may_end)
        problem = problem or _what_became_of(child, told_read, report)[0]
        os.close(may_end_write)
        os.close(told_read)
        if problem:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    ended.set()
    for thread in threads:
        thread.join(LIMIT_S)
    scene.close()
    return problem or "".join(line for error in failed for line in traceback.format_exception(error))
