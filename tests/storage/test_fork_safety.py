"""The package's locks and descriptors that must not cross a fork are all registered."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_trial import locked_files

import segmentlog
from segmentlog.consuming import wakeup
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.interrupts import Interrupt, interrupt_at, list_points

PACKAGE = Path(segmentlog.__file__).parent


def in_child(act: Callable[[], object]) -> str:
    """Return the repr of the result, or of the exception, in a forked child. Ten seconds count as a hang."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        try:
            try:
                said = repr(act())
            except BaseException as error:
                said = repr(error)
            os.write(write_fd, said.encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    ends_s = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(read_fd)
            return "hangs"
        time.sleep(0.005)
    with open(read_fd) as said_by:
        return said_by.read()


class Owner:
    """One lock of each kind, and a state that a child forgets."""

    def __init__(self) -> None:
        self.lock = fork_safety.lock(self, "lock")
        self.reentrant = fork_safety.reentrant_lock(self, "reentrant")
        self.condition = fork_safety.condition(self, "condition")
        self.event = fork_safety.event(self, "event")
        self.state = "parent's"
        fork_safety.on_fork(self, "_forget")

    def _forget(self) -> None:
        with self.lock, self.reentrant, self.condition:  # new ones already
            self.state = "child's"


def in_another_thread(begin: Callable[[], object], end: Callable[[], object]) -> Callable[[], None]:
    """Have a thread begin something; call the result to have it end it."""
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begin()
        begun.set()
        go.wait(10)
        end()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)

    def finish() -> None:
        go.set()
        thread.join()

    return finish


def test_locks_are_free_in_a_child_and_taken_in_the_parent() -> None:
    """The child gets new locks and its methods are called, whatever another thread holds; the parent's locks stay."""
    owner = Owner()
    owner.event.set()

    def take() -> None:
        owner.lock.acquire()
        owner.reentrant.acquire()
        owner.condition.acquire()

    def release() -> None:
        owner.condition.release()
        owner.reentrant.release()
        owner.lock.release()

    finish = in_another_thread(take, release)

    def look() -> tuple[bool, ...]:
        return owner.lock.acquire(False), owner.reentrant.acquire(False), owner.condition.acquire(False)

    assert in_child(look) == "(True, True, True)"
    assert in_child(lambda: (owner.state, owner.event.is_set())) == '("child\'s", False)'
    assert look() == (False, False, False)
    assert owner.state == "parent's"
    finish()


def test_an_owner_is_not_kept_alive() -> None:
    """The registry refers to owners weakly: dropping an object with locks frees it and its entry."""
    owners = [Owner() for _ in range(100)]
    mine = {number for number, entry in fork_safety._entries.items() if isinstance(entry(), Owner)}
    assert len(mine) == 500
    owners.clear()
    gc.collect()
    assert not mine & fork_safety._entries.keys()


def test_one_that_fails_keeps_no_other_from_forgetting(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that raises in the child is reported on stderr, after all other methods were called."""

    class Broken(Owner):
        def _forget(self) -> None:
            raise ValueError("broken owner")

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    broken, sound = Broken(), Owner()
    assert in_child(lambda: sound.state) == '"child\'s"'
    assert "broken owner" in capfd.readouterr().err
    del broken


def test_a_lock_ends_with_the_parent_and_not_before(tmp_path: Path) -> None:
    """A child's copy of a held descriptor is closed without unlocking: the parent has the lock, and alone."""
    fs = FileSystem()
    fd = fork_safety.open_lockable(fs, str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert in_child(lambda: os.fstat(fd)).startswith("OSError(9")
    assert in_child(lambda: locked_files(tmp_path)) == "['lock']"
    go_read, go_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_write)
        os.read(go_read, 1)
        os._exit(0)
    fork_safety.close_lockable(fs, fd)
    assert locked_files(tmp_path) == []
    os.close(go_write)
    os.close(go_read)
    os.waitpid(child, 0)


def test_a_child_lets_go_of_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    """Letting go of a parent's descriptor closes no file that has got its number in the child."""
    fs = FileSystem()
    fd = fork_safety.open_lockable(fs, str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT)

    def reuse() -> str:
        while (other := os.open(tmp_path / "lock", os.O_RDONLY)) < fd:
            pass
        fork_safety.close_lockable(fs, fd)
        os.fstat(other)
        return f"{other == fd}"

    assert in_child(reuse) == "'True'"
    fork_safety.close_lockable(fs, fd)


def test_no_fork_between_opening_and_noting(tmp_path: Path) -> None:
    """A fork waits while another thread opens a file: the child has no unregistered descriptor."""

    class Slow(FileSystem):
        def __init__(self) -> None:
            self.open = self._slowly  # type: ignore[method-assign,assignment]

        def _slowly(self, *args: object) -> int:
            fd = os.open(*args)  # type: ignore[arg-type]
            opened.set()
            time.sleep(0.2)
            return fd

    opened = threading.Event()
    fs = Slow()
    held: list[int] = []
    thread = threading.Thread(target=lambda: held.append(fork_safety.open_lockable(fs, str(tmp_path / "lock"), 66)))
    thread.start()
    assert opened.wait(10)
    assert in_child(lambda: os.fstat(held[0] if held else 10**6)).startswith("OSError(9")
    thread.join()
    fork_safety.close_lockable(fs, held[0])


def test_a_fork_in_the_middle_of_an_opening_does_not_wait_for_itself(tmp_path: Path) -> None:
    """A handler or finalizer that forks while its own thread opens a file: parent and child each get their own."""
    children: list[int] = []
    read_fd, write_fd = os.pipe()

    class Forking(FileSystem):
        def __init__(self) -> None:
            self.open = self._forks  # type: ignore[method-assign,assignment]

        def _forks(self, *args: object) -> int:
            fd = os.open(*args)  # type: ignore[arg-type]
            if not children:
                children.append(os.fork())
            return fd

    fs = Forking()
    fd = fork_safety.open_lockable(fs, str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT)
    if not children[0]:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child's own lock, released when the child ends
            os.write(write_fd, b"locked")
        finally:
            os._exit(0)
    os.waitpid(children[0], 0)
    assert os.read(read_fd, 10) == b"locked"
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fork_safety.close_lockable(fs, fd)
    assert locked_files(tmp_path) == []
    os.close(read_fd)
    os.close(write_fd)


# ---------------------------------------------------------------- whole programs

_EXITS = """
import os, sys
import segmentlog
store = segmentlog.open(sys.argv[1])
log = store.topic("t").partition(0)
log.append([b"of the parent"])
producer = store.producer(linger_ms=60_000)
producer.send("t", b"unsent")
child = os.fork()
if not child:
    if sys.argv[2] == "appends":
        log.append([b"of the child"])
    sys.exit(0)  # with everything that is called at an exit
os.waitpid(child, 0)
clean = log._checkpoint().clean
log.append([b"after"])
producer.close()
values = [value for batch in log.read(0) for value in batch.values]
print(clean, values.count(b"unsent"), len(values))
store.close()
"""


@pytest.mark.parametrize("does", ["nothing", "appends"])
def test_the_exit_of_a_child_is_not_the_parents(does: str, tmp_path: Path) -> None:
    """A child that exits sends nothing that the parent has queued, and closes only its own files."""
    path = tmp_path / "store"
    with segmentlog.open(path, background=False) as store:
        store.create_topic("t", fsync="never")
        store.topic("t").partition(0).append([b"first"])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _EXITS, str(path), does], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=60,
    )  # fmt: skip
    clean, unsent, count = done.stdout.split()
    assert unsent == "1"
    assert (clean, count) == (("True", "5") if does == "appends" else ("False", "4")), done.stderr
    with segmentlog.open(path, background=False) as store:
        assert store.topic("t").partition(0).recovery_report.verdict == "clean"


def test_a_child_consumes_beside_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parent and child continue with a consumer each: neither takes events that should wake the other process."""
    monkeypatch.setattr(wakeup, "WAIT_S", 3_600.0)  # time alone wakes neither
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", fsync="never")
        log = store.topic("t").partition(0)
        log.append([b"0"])
        with store.consumer("t", follow=True) as consumer:
            consumer._follower.wait(None)
            records = iter(consumer)
            assert next(records).value == b"0"
            for number in range(3):
                later = threading.Timer(0.05, log.append, args=([b"%d" % (2 * number + 1)],))

                def follow(number: int = number) -> bytes | None:
                    appends = threading.Timer(0.05, log.append, args=([b"of the child"],))
                    appends.start()
                    consumer.wakeup()
                    assert list(consumer) == []  # its own wakeup, which is not the parent's
                    return next(iter(consumer)).value

                assert in_child(follow) == "b'of the child'"
                later.start()
                assert next(records).value == b"of the child"
                assert next(records).value == b"%d" % (2 * number + 1)


def test_a_childs_child_is_a_child(tmp_path: Path) -> None:
    """Forks of forks: each generation has locks and files of its own."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", fsync="never")
        log = store.topic("t").partition(0)
        owner = Owner()

        def append() -> tuple[int, str]:
            owner.lock.acquire()
            assert fork_safety.generation() == before + 1
            said = in_child(lambda: (log.append([b"x"], ack="durable"), owner.lock.acquire(False)))
            return log.append([b"y"]), said

        before = fork_safety.generation()
        assert in_child(append) == "(1, '(0, True)')"
        assert log.append([b"z"]) == 2


@contextlib.contextmanager
def a_child_that_lives_on() -> Iterator[None]:
    """Forked now, and there until the end of the block."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(write_fd)
            os.read(read_fd, 1)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.close(write_fd)
        os.close(read_fd)
        os.waitpid(child, 0)


def test_a_child_keeps_neither_name_nor_compaction(tmp_path: Path) -> None:
    """Forked while a thread decides about a name, or compacts: then both are free, though the child lives."""
    path = tmp_path / "store"
    with segmentlog.open(path, background=False) as store, contextlib.ExitStack() as children:
        store.create_topic("k", cleanup_policy="compact")
        log = store.topic("k").partition(0)
        for held in (lambda: store.transactions._names.locked("etl"), lambda: log._cleaner._lease.hold()):
            with held():
                assert len(locked_files(path)) == 1
                children.enter_context(a_child_that_lives_on())
                assert len(locked_files(path)) == 1
            assert locked_files(path) == []
        with store.producer(name="etl"):
            children.enter_context(a_child_that_lives_on())
            assert len(locked_files(path)) == 1
        assert locked_files(path) == []


# ---------------------------------------------------------------- nobody else makes any

_MAKERS = {
    "threading": {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"},
    "_thread": {"allocate_lock", "RLock"},
    "os": {"pipe", "pipe2", "eventfd", "memfd_create", "register_at_fork"},
    "multiprocessing": {"Lock", "RLock", "Condition", "Event", "Queue"},
    "queue": {"Queue", "SimpleQueue", "LifoQueue", "PriorityQueue"},
    "select": {"epoll", "kqueue"},
    "fcntl": {"flock", "lockf"},
}
_ALLOWED = {
    ("storage/fork_safety.py", "threading.Lock"): "the list",
    ("storage/fork_safety.py", "threading.RLock"): "the list",
    ("storage/fork_safety.py", "threading.Condition"): "the list",
    ("storage/fork_safety.py", "threading.Event"): "the list",
    ("storage/fork_safety.py", "os.register_at_fork"): "the list",
    ("storage/watch.py", "os.pipe2"): "within `fork_safety.forks_blocked`, and closed by its owner's `on_fork`",
    ("storage/watch.py", "inotify_init1"): "within `fork_safety.forks_blocked`, and closed by its owner's `on_fork`",
    ("storage/fs.py", "fcntl.flock"): "the seam itself",
    (
        "log/append/group_commit.py",
        "_thread.allocate_lock",
    ): "what a queued thread sleeps on: a child has no such thread",
    ("storage/interrupt_safe.py", "_thread.allocate_lock"): "the same",
    ("coordination/swap_race.py", "threading.Barrier"): "lives for one call of a command, with its threads",
    (
        "topics/background_threads.py",
        "queue.SimpleQueue",
    ): "has no lock that a finalizer could meet; made anew by its owner's `on_fork`",
    ("aio/pool.py", "queue.SimpleQueue"): "made anew by its owner's `on_fork`",
    ("aio/loop_bridge.py", "queue.SimpleQueue"): "of a loop, which a child has not: `LoopBridge.check_loop`",
    ("aio/loop_callbacks.py", "queue.SimpleQueue"): "of one call, between its thread and the loop",
    ("logs/buffer.py", "queue.SimpleQueue"): "made anew by its owner's `on_fork`",
    (
        "cli/spark_command.py",
        "threading.Event",
    ): "a program's main thread waits for its own canceller, and nobody forks",
    ("spark/pipelines/topic_verify.py", "threading.Event"): "of one call, between it and its progress thread",
    (
        "spark/pipelines/pipeline_queries.py",
        "threading.Condition",
    ): "of one query's listener; its process talks to a JVM",
}
_SERVER = "server/"
"""Its locks are of threads that a forked child has not: `Listener` closes the child's copies of all sockets, and what
is left of the server there does nothing (tests/server/test_forks.py)."""
_OPENED_ELSEWHERE = {
    "storage/fs.py", "storage/fork_safety.py", "storage/state_page.py", "testing",
    # `Handle`'s files
    "log/append/appender.py", "log/append/syncer.py", "log/recovery/open_partition.py",
    "log/repair/partition_repair.py",
}  # fmt: skip
"""Files that lock a descriptor that they were given: who opened it did so through the list."""


def sources() -> list[Path]:
    """Return every source file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    return files


def _annotations_of(tree: ast.AST) -> set[int]:
    """Types in signatures and declarations make nothing."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        for said in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if said is not None:
                inside.update(id(one) for one in ast.walk(said))
    return inside


def test_every_lock_is_on_the_list() -> None:
    """Locks, pipes and inotify descriptors are created by `storage.fork_safety`; each exception has a reason."""
    unknown = set()
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("testing/"):
            continue
        tree = ast.parse(path.read_text())
        types = _annotations_of(tree)
        for node in ast.walk(tree):
            what = ""
            if isinstance(node, ast.ImportFrom) and node.module in _MAKERS:
                what = next((f"{node.module}.{one.name}" for one in node.names if one.name in _MAKERS[node.module]), "")
            elif isinstance(node, ast.Attribute) and id(node) not in types:
                of = node.value.id if isinstance(node.value, ast.Name) else ""
                if node.attr in _MAKERS.get(of, ()):
                    what = f"{of}.{node.attr}"
                elif node.attr.startswith("inotify_init"):
                    what = node.attr
            if what and not name.startswith(_SERVER):
                unknown.add((name, what))
    assert unknown == set(_ALLOWED), "make it through segmentlog.storage.fork_safety, or say here why not"


def test_every_file_that_is_locked_was_opened_through_the_list() -> None:
    """A module that calls `flock` opens the file with `open_lockable` or `opened_lockable`, or gets its descriptor."""
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        if name in _OPENED_ELSEWHERE or name.split("/")[0] in _OPENED_ELSEWHERE:
            continue
        tree = ast.parse(path.read_text())
        locks = any(isinstance(node, ast.Attribute) and node.attr in ("flock", "lockf") for node in ast.walk(tree))
        if locks:
            names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
            assert names & {"open_lockable", "opened_lockable", "lock_fence"}, (
                f"{name} locks a file that it opens by itself"
            )


_IMPORTS = """
import os, sys, threading, time
import segmentlog
class Slowly:
    def find_spec(self, name, path, target=None):
        if name == "segmentlog.policy.partitioner":
            begun.set()
            time.sleep(0.5)
begun = threading.Event()
sys.meta_path.insert(0, Slowly())
store = segmentlog.open(sys.argv[1], background=False)
store.create_topic("t")
thread = threading.Thread(target=store.producer)  # the first to need that module
thread.start()
begun.wait()
child = os.fork()
if not child:
    store.producer().close()
    os._exit(0)
thread.join()
print(os.waitpid(child, 0)[1])
"""


_TWO_IMPORTS = """
import importlib, os, sys, threading, time
import segmentlog, segmentlog.store
FIRST, SECOND = "segmentlog.exchange.csv_file", "segmentlog.tables.key_table"
begun = {FIRST: threading.Event(), SECOND: threading.Event()}
class Slowly:
    def find_spec(self, name, path, target=None):
        if name in begun:
            begun[name].set()
            time.sleep(0.3)
sys.meta_path.insert(0, Slowly())
real = importlib.import_module
def load(name):
    threading.Thread(target=real, args=(name,)).start()
    begun[name].wait()
def import_module(name, *rest):
    if name == FIRST:  # the fork waits for it: meanwhile another thread begins with another one
        load(SECOND)
    return real(name, *rest)
load(FIRST)
importlib.import_module = import_module
child = os.fork()
if not child:
    real(FIRST), real(SECOND)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("script", [_IMPORTS, _TWO_IMPORTS], ids=["one", "two in turn"])
def test_no_child_waits_for_a_module_that_its_parent_is_importing(tmp_path: Path, script: str) -> None:
    """A child can import a module on first use, although threads of the parent were importing it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "store")], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "0", done.stderr


def test_a_store_of_nothing_but_copies_closes(tmp_path: Path) -> None:
    """A child that only closes what it inherited, without the parent's worker threads, ends at once."""
    store = segmentlog.open(tmp_path / "store")
    store.create_topic("t")
    store.topic("t").partition(0).append([b"x"])
    with contextlib.closing(store.producer()) as producer:
        producer.send("t", b"y")
        assert in_child(lambda: (producer.close(), store.close())) == "(None, None)"
    store.close()


def test_a_held_descriptor_is_closed_when_it_is_dropped_and_not_by_the_collector(tmp_path: Path) -> None:
    """An interrupt leaves no descriptor open; a descriptor that a finalizer resurrects can be used."""

    class Owner:
        def __init__(self) -> None:
            self.me = self
            self.fd = fork_safety.open_lockable(FileSystem(), f"{tmp_path}/lock", os.O_RDWR | os.O_CREAT)

        def __del__(self) -> None:
            kept.append(self)

    kept: list[Owner] = []
    owner = Owner()
    number = int(owner.fd)
    del owner
    gc.collect()
    (owner,) = kept
    os.fstat(owner.fd)
    kept.clear()
    owner.me = None  # type: ignore[assignment]
    owner.fd = -1  # type: ignore[assignment]
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def _of_ours() -> list[object]:
    return [one for one in gc.callbacks if getattr(one, "__module__", "").startswith("segmentlog")]


def test_nothing_runs_when_what_was_let_go_of_is_dropped(tmp_path: Path) -> None:
    """An interrupt in a finalizer is lost, and there is one of these for each file that is locked for a while."""
    fs = FileSystem()

    def hold_and_drop() -> None:
        fd = fork_safety.open_lockable(fs, str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT)
        fork_safety.close_lockable(fs, fd)
        fork_safety.close_lockable(fs, fd)  # the interrupted caller repeats the call
        with fork_safety.opened_lockable(fs, str(tmp_path / "lock"), os.O_RDWR):
            pass

    heard = 0
    gc.collect()
    gc.disable()  # a collection could run code of ours that closes what others dropped
    try:
        passed = list_points(hold_and_drop)
        for at in range(1, len(passed) + 1):
            outcome = interrupt_at(at, hold_and_drop)
            if outcome.place is not None:
                assert isinstance(outcome.error, Interrupt), outcome.place
                heard += 1
            del outcome
    finally:
        gc.enable()
    gc.collect()  # collects the frames of tracebacks, and the objects that they refer to
    assert [str(place) for place in passed if "__del__" in place.function] == []
    assert len(passed) > 10
    assert heard > 10


def test_collections_run_nothing_of_ours_while_there_is_nothing_to_do(tmp_path: Path) -> None:
    """An interrupt in a callback of the collector is lost, and programs collect thousands of times a second."""
    gc.collect()
    assert not _of_ours()

    class Owner:
        def __init__(self) -> None:
            self.me = self
            self.fd = fork_safety.open_lockable(FileSystem(), f"{tmp_path}/lock", os.O_RDWR | os.O_CREAT)

    number = int(Owner().fd)
    seen: list[str] = []

    def others(phase: str, info: object) -> None:
        seen.append(phase)

    gc.callbacks.insert(0, others)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(others)
    assert seen == ["start", "stop"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert not _of_ours()


def test_no_interrupt_is_lost_in_a_collection() -> None:
    """Each interrupt is raised in the program, however often they come during garbage collections."""
    script = (
        "import gc, segmentlog.storage.fork_safety, signal, sys\n"
        "class Came(Exception): pass\n"
        "def come(*_): raise Came\n"
        "signal.signal(signal.SIGALRM, come)\n"
        "lost = []\n"
        "sys.unraisablehook = lambda found: lost.append(str(found.object))\n"
        "gc.freeze()\n"
        "for number in range(2000):\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 1e-5 + number * 2e-8)\n"
        "        while True:\n"
        "            gc.collect(0)\n"
        "    except Came:\n"
        "        pass\n"
        "print(lost)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")
