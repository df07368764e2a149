"""Fixtures and hooks that all tests share."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from leftovers import Snapshot, close_opened, left_since
from seeds import fresh_seed, given_seed

from segmentlog.topics import background_work

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts background processes with SIGINT ignored. The processes that tests start and
    # interrupt would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes; each would spend 0.1 s on starting numpy's threads for linear algebra.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No deadline: a slow example may only mean that the machine is busy. In CI, Hypothesis would try the same examples in
# every run; here it uses the fresh seed of the run, and prints how to repeat a failure.
settings.register_profile("segmentlog", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("segmentlog")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of Hypothesis before it reads its option; the processes of pytest-xdist inherit it."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(fresh_seed())


def _seed_line() -> str:
    if given_seed() is not None:
        return f"random tests: SEGMENTLOG_SEED={given_seed()} alone"
    return f"random tests: fixed seeds, and {fresh_seed()}; SEGMENTLOG_SEED={fresh_seed()} takes that one alone"


def pytest_report_header() -> str:
    """Return the fresh seed of this run."""
    return _seed_line()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seed again: the output of a test process that died shows only the end."""
    terminalreporter.write_line(_seed_line())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the seed of a failed test to its report."""
    report = yield
    seed = getattr(item, "callspec", None) and item.callspec.params.get("seed")
    if report.failed and seed is not None:
        report.sections.append(("seed", f"SEGMENTLOG_SEED={seed} pytest {item.nodeid.split('[')[0]}"))
    return report


_LONG_FOLDERS = {"crash", "damage", "ecosystem", "fuzz"}
# Every test in these folders crashes, damages or tries a lot.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole folders `long`, and let the longest tests start first."""
    for item in items:
        of_bench = item.path.name.startswith("test_bench")
        in_long_folder = _LONG_FOLDERS & set(item.path.relative_to(item.config.rootpath).parts)
        if of_bench or in_long_folder or _DOWNLOADED & _kinds(item):
            item.add_marker(pytest.mark.long)
    items.sort(key=_minutes, reverse=True)  # stable: tests of one file stay in their order


_DOWNLOADED = {"java", "kafkajs", "versitygw"}
# Clients and servers that the test set-up fetches and builds first, which a quick test cannot wait for.


def _kinds(item: pytest.Item) -> set[str]:
    """Return the parameters and the fixtures of a test, by name: what it needs."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params.values() if callspec else ()
    return {one for one in parameters if isinstance(one, str)} | set(getattr(item, "fixturenames", ()))


def _minutes(item: pytest.Item) -> float:
    """Return about how long a test takes: as its `long` marker says, much for Spark's, nothing for a quick one."""
    if item.get_closest_marker("spark"):
        return 60.0
    mark = item.get_closest_marker("long")
    return 0.0 if mark is None else max(mark.kwargs.get("minutes", 0.0), 0.01)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves descriptors, threads or child processes behind. It is the first fixture and the last.

    Resources from before the test do not count. A test with Spark shares processes and sockets of the session, so only
    its files below the temporary folder count. A test must also keep the function that measures coverage: otherwise no
    line of later tests in this process would count.
    """
    before, failures, measuring = Snapshot.take(), request.session.testsfailed, sys.gettrace()
    yield
    close_opened()
    if sys.gettrace() is not measuring:
        sys.settrace(measuring)
        pytest.fail("a trace function was left behind, or taken away", pytrace=False)
    if request.session.testsfailed == failures:  # otherwise the traceback keeps local variables, and their files, alive
        left = left_since(before, tempfile.gettempdir() if request.node.get_closest_marker("spark") else None)
        if left:
            pytest.fail(left, pytrace=False)


@pytest.fixture(autouse=True)
def _whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one tick of retention scan all partitions, however busy the machine is."""
    monkeypatch.setattr(background_work, "_SLICE_S", 60.0)


_MEMORY = "/dev/shm"
_ROOM_BYTES = 1 << 30


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory if there is room: for thousands of files whose fsyncs do not matter to the test."""
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < _ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="segmentlog-test-", dir=_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def small_steps() -> Iterator[None]:
    """Make offset ceilings and recovery points advance often enough for a short workload to reach faults in them."""
    with (
        mock.patch("segmentlog.log.append.appender.OFFSET_CEILING_STEP", 10),
        mock.patch("segmentlog.log.offset_grants.OFFSET_CEILING_STEP", 10),
        mock.patch("segmentlog.log.append.syncer.CHECKPOINT_BYTES", 800),
    ):
        yield
