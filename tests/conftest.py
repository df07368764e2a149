"""What all tests share."""

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
    # Started in the background of a shell that has no job control: processes that tests start and
    # interrupt would inherit this, and not hear the interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Of the hundreds of processes that tests start, each would spend 0.1 s on numpy's threads for linear algebra.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No deadline: a busy machine is not a slow function. In CI, where Hypothesis would try the same examples for ever, it
# explores as anywhere else, from the fresh seed of the run, and prints what brings a failure back.
settings.register_profile("segmentlog", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("segmentlog")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis reads its option; the processes of pytest-xdist get it with the others."""
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
    """Once more: the output of a test process that died shows nothing else."""
    terminalreporter.write_line(_seed_line())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Yield a test that fails names the seed it had."""
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

    What there was when it began is not its own. Of a test with Spark, which has processes and
    sockets for the session, only files below the temporary folder count. Nor may it take away the function that
    measures coverage: of all that comes after it in its process no line would count.
    """
    before, failures, measuring = Snapshot.take(), request.session.testsfailed, sys.gettrace()
    yield
    close_opened()
    if sys.gettrace() is not measuring:
        sys.settrace(measuring)
        pytest.fail("a trace function was left behind, or taken away", pytrace=False)
    if request.session.testsfailed == failures:  # else the traceback holds on to whatever it passed through
        left = left_since(before, tempfile.gettempdir() if request.node.get_closest_marker("spark") else None)
        if left:
            pytest.fail(left, pytrace=False)


@pytest.fixture(autouse=True)
def _whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick of retention goes through all of a round, however busy the machine is."""
    monkeypatch.setattr(background_work, "_SLICE_S", 60.0)


_MEMORY = "/dev/shm"
_ROOM_BYTES = 1 << 30


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is room: for thousands of files whose fsyncs nobody asks about."""
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < _ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="segmentlog-test-", dir=_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def small_steps() -> Iterator[None]:
    """Ceilings and recovery points move often enough to fail in a short workload."""
    with (
        mock.patch("segmentlog.log.append.appender.OFFSET_CEILING_STEP", 10),
        mock.patch("segmentlog.log.offset_grants.OFFSET_CEILING_STEP", 10),
        mock.patch("segmentlog.log.append.syncer.CHECKPOINT_BYTES", 800),
    ):
        yield
