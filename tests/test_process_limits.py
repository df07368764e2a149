"""A process that reaches a resource limit gets an error, other processes are not affected, and it works again later."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import segmentlog
from segmentlog.errors import ProcessLimitError
from segmentlog.topics.descriptor_budget import DescriptorBudget, budget

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of processes as Linux has them")

_DESCRIPTORS = """
import errno, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import segmentlog
stores = [segmentlog.open(path, background=False) for path in sys.argv[1:]]
logs = [store.topic("t").partition(number) for store in stores for number in range(30)]
for log in logs:
    log.append([b"idle"], ack="durable")
used = len(os.listdir("/proc/self/fd"))
assert used < 128 * 3 // 4, f"the budget is the process's, and {used} are open"
wasted = []
try:
    while True:
        wasted.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    assert error.errno == errno.EMFILE
told = 0
for log in logs:
    for value in (b"short", b"durable"):
        try:
            log.append([value], ack="durable")
        except segmentlog.ProcessLimitError as error:
            assert error.errno == errno.EMFILE and "ulimit -n" in str(error), error
            told += 1
for fd in wasted:
    os.close(fd)
for log in logs:
    assert log.failed is None
    log.append([b"after"], ack="durable")
    assert [batch.values for batch in log.read(log.log_end_offset - 1)] == [[b"after"]]
for store in stores:
    store.close()
print(told)
"""

_FILE_SIZE = """
import errno, resource, sys
import segmentlog
store = segmentlog.open(sys.argv[1], background=False)
log = store.topic("t").partition(0)
log.append([b"x" * 1000], ack="durable")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
written = 1
try:
    while True:
        log.append([written.to_bytes(2, "big") * 2500])
        written += 1
except segmentlog.ProcessLimitError as error:
    assert error.errno == errno.EFBIG and "ulimit -f" in str(error) and "nothing was appended" in str(error), error
assert written > 5 and log.failed is None and log.log_end_offset == written
log.append([b"fits"], ack="durable")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.append([b"after"], ack="durable")
assert log.log_end_offset == written + 2
assert sum(len(batch.values) for batch in log.read(0)) == written + 2
store.close()
print(written)
"""

_MEMORY = """
import errno, resource, sys
import segmentlog
store = segmentlog.open(sys.argv[1], background=False)
log = store.topic("t").partition(0)
values = [b"%04d" % number + b"x" * 4000 for number in range(8000)]
for at in range(0, 8000, 500):
    log.append(values[at : at + 500])
log.roll()
pages = int(open("/proc/self/statm").read().split()[0])
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, ((pages + 2000) * 4096, hard))
told = 0
try:
    for batch in log.read(0):
        pass
except OSError as error:
    assert error.errno == errno.ENOMEM
    told = 1
log.append([b"small"], ack="durable")
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert sum(len(batch.values) for batch in log.read(0)) == 8001
assert log.failed is None
store.close()
print(told)
"""


def run(script: str, *paths: Path) -> str:
    """Return the output of a process that runs the script."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("stores", [1, 2])
def test_a_want_of_descriptors_is_no_failed_fsync(tmp_path: Path, stores: int) -> None:
    """Idle partitions of any store close descriptors; a call that gets none raises, and other processes work."""
    paths = [tmp_path / str(number) for number in range(stores)]
    opened = [segmentlog.open(path, background=False) for path in paths]
    logs = [store.create_topic("t", partitions=30, compression_type="none").partition(0) for store in opened]
    for log in logs:
        log.append([b"before"])
    run(_DESCRIPTORS, *paths)
    for store, log in zip(opened, logs, strict=True):
        assert log.failed is None
        log.append([b"other"], ack="durable")
        assert not store.health()
        store.close()


def test_a_limit_on_the_size_of_files_is_no_failing_disk(tmp_path: Path) -> None:
    """EFBIG: the append raises and is truncated, smaller appends succeed, and larger ones once the limit is raised."""
    with segmentlog.open(tmp_path, background=False) as store:
        log = store.create_topic("t", compression_type="none").partition(0)
        run(_FILE_SIZE, tmp_path)
        assert log.failed is None
        log.append([b"other"], ack="durable")


def test_a_limit_on_memory_is_no_failing_disk(tmp_path: Path) -> None:
    """ENOMEM for a map: the read raises, appends succeed, and the reader continues once there is memory."""
    with segmentlog.open(tmp_path, background=False) as store:
        log = store.create_topic("t", compression_type="none").partition(0)
        assert run(_MEMORY, tmp_path) == "1\n"
        assert log.failed is None
        assert log.append([b"other"], ack="durable") == 8001


def test_the_budget_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files a partition, within two thirds of the limit, in all stores together; a later limit counts, too."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 4096))
    assert budget.limit() == DescriptorBudget().limit() == 170
    monkeypatch.setattr("resource.getrlimit", lambda which: (128, 4096))
    assert budget.limit() == 21


def test_a_local_error_is_an_oserror_with_its_number() -> None:
    """It survives pickling, and its message has the remedy."""
    import pickle

    error = pickle.loads(
        pickle.dumps(ProcessLimitError(errno.EMFILE, "Too many open files; nothing was appended", "/s/t/0"))
    )
    assert isinstance(error, OSError)
    assert (error.errno, error.path) == (errno.EMFILE, "/s/t/0")
    assert str(error) == (
        "/s/t/0: Too many open files; nothing was appended; close files of this process, or raise its limit"
        " (ulimit -n), and try again"
    )
