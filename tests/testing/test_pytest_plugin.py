"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

_ROOT = Path(__file__).resolve().parents[2]
_PLUGIN = "segmentlog.testing.pytest_plugin"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Load only the named plugin: the installed package may be another one than the tested one."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.plugins = [_PLUGIN]
    return pytester


def _stores(pytester: pytest.Pytester) -> list[Path]:
    return sorted(path.parent for path in pytester.path.rglob("store.json"))


def test_it_is_registered_and_costs_nothing() -> None:
    """The package registers the plugin, and a run that does not use it does not import numpy or the engine."""
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    assert setup["options.entry_points"]["pytest11"].split() == ["segmentlog", "=", _PLUGIN]
    program = (
        f"import sys, {_PLUGIN}; print(*(name for name in sys.modules if name.startswith(('segmentlog', 'numpy'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"segmentlog", "segmentlog.defaults", "segmentlog.testing", _PLUGIN}


def test_a_server_for_each_test(run: pytest.Pytester) -> None:
    """Each test has its own, with its marker's options; topics are new; folders of tests that passed are deleted."""
    run.makepyfile(
        """
        import time
        import pytest
        from kafka import KafkaConsumer, KafkaProducer

        paths = []

        def test_round_trip(segmentlog_server, segmentlog_topic):
            paths.append(segmentlog_server.path)
            producer = KafkaProducer(bootstrap_servers=segmentlog_server.bootstrap_servers)
            producer.send(segmentlog_topic, b"hello", key=b"k").get(10)
            producer.close()
            (record,) = segmentlog_server.store.consumer(segmentlog_topic)
            assert (record.key, record.value) == (b"k", b"hello")
            segmentlog_server.store.topic(segmentlog_topic).partition(0).append([b"world"])
            consumer = KafkaConsumer(
                segmentlog_topic, bootstrap_servers=segmentlog_server.bootstrap_servers, auto_offset_reset="earliest"
            )
            assert [next(consumer).value, next(consumer).value] == [b"hello", b"world"]
            consumer.close()

        @pytest.mark.segmentlog(default_partitions=4, acks_all="written", auto_create=False)
        def test_options(segmentlog_server, segmentlog_topic):
            assert segmentlog_server.path not in paths
            assert segmentlog_server.store.topic(segmentlog_topic).partition_count == 4
            assert segmentlog_server._server.worker.broker.settings.acks_all == "written"

        @pytest.mark.parametrize("segmentlog_topic", [3, {"partitions": 2, "cleanup_policy": "compact"}], indirect=True)
        def test_topics(segmentlog_server, segmentlog_topic):
            topic = segmentlog_server.store.topic(segmentlog_topic)
            assert (topic.partition_count, topic.config.compacts) in [(3, False), (2, True)]

        @pytest.mark.parametrize("segmentlog_server", [{"default_partitions": 5}], indirect=True)
        def test_options_by_parameter(segmentlog_server):
            assert segmentlog_server.default_partitions == 5

        @pytest.mark.segmentlog(acks="all")
        def test_no_such_option(segmentlog_server):
            pass
        """
    )
    result = run.runpytest_subprocess("-rA", "--basetemp", str(run.path / "tmp"))
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(["*unknown options of a segmentlog server: acks; valid are *acks_all*"])
    assert _stores(run) == []


def test_the_folder_of_a_failure_is_kept(run: pytest.Pytester) -> None:
    """The report says how to inspect the folder. The folder of a test that passed is deleted, also after `-x`."""
    run.makepyfile(
        """
        def test_passes(segmentlog_server, segmentlog_topic):
            pass

        def test_fails(segmentlog_server):
            segmentlog_server.store.create_topic("evidence").partition(0).append([b"x"])
            assert False

        def test_does_not_come(segmentlog_server):
            pass
        """
    )
    result = run.runpytest_subprocess("-x", "--basetemp", str(run.path / "tmp"))
    result.assert_outcomes(passed=1, failed=1)
    (path,) = _stores(run)
    result.stdout.fnmatch_lines([f"the store is kept: segmentlog --dir {path} topics"])
    assert (path / "evidence").is_dir()


@pytest.mark.parametrize("how", ["ini", "option"])
def test_one_server_for_many_tests(run: pytest.Pytester, how: str) -> None:
    """The scope can be chosen; a module's marker applies, and a marker that comes too late is an error."""
    run.makepyfile(
        """
        import pytest
        from segmentlog.testing.pytest_plugin import server_fixture

        pytestmark = pytest.mark.segmentlog(default_partitions=2)
        another = server_fixture(scope="session", default_partitions=7)
        seen = set()

        @pytest.mark.parametrize("number", range(3))
        def test_shared(segmentlog_server, segmentlog_topic, number, another):
            seen.add(segmentlog_server.path)
            assert len(seen) == 1
            assert len(segmentlog_server.store.topics()) == number + 1
            assert segmentlog_server.store.topic(segmentlog_topic).partition_count == 2
            assert another.path != segmentlog_server.path
            assert another.default_partitions == 7

        @pytest.mark.segmentlog(acks_all="written")
        def test_too_late(segmentlog_server):
            pass
        """
    )
    arguments = ["--basetemp", str(run.path / "tmp"), "-o", "segmentlog_scope=function"]
    if how == "ini":
        arguments[-1] = "segmentlog_scope=module"
    else:
        arguments.append("--segmentlog-scope=module")
    result = run.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*applies to only a part of the tests that share the server (scope module)*"])


def test_in_processes_side_by_side(run: pytest.Pytester) -> None:
    """With pytest-xdist, each process has its own servers."""
    pytest.importorskip("xdist")
    run.plugins.append("xdist.plugin")
    run.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("number", range(4))
        def test_alone(segmentlog_server, segmentlog_topic, number):
            assert len(segmentlog_server.store.topics()) == 1
            assert number < 3
        """
    )
    result = run.runpytest_subprocess("-n", "2", "--segmentlog-scope=function", "--basetemp", str(run.path / "tmp"))
    result.assert_outcomes(passed=3, failed=1)
    (path,) = _stores(run)
    result.stdout.fnmatch_lines([f"the store is kept: segmentlog --dir {path} topics"])
