"""librdkafka's own tests, at `segmentlog serve`: verdicts.py says which, and why not the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from ecosystem.librdkafka.suite import environment, suite, tests_with_brokers
from ecosystem.librdkafka.verdicts import ADMIN, NEW_GROUPS, PASS, PASS_WITHOUT_AUTO_CREATE, REASONS
from server.clients.fetching import Missing
from waiting import wait_until

pytestmark = pytest.mark.ecosystem

_RULES = "".join(f"allow User:* all {kind}\n" for kind in ("topic:*", "group:*", "transactional-id:*", "cluster"))
_TRIES = 3
"""Some tests bound by a millisecond what librdkafka itself takes; what fails is tried again, alone."""


@pytest.fixture(scope="session")
def tests() -> Path:
    """Return the folder of the built suite."""
    try:
        return suite()
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


@contextmanager
def serving(folder: Path, rules: str, *options: str) -> Iterator[str]:
    """Run the server with four partitions for a topic, like the suite's own brokers, and yield its address."""
    folder.mkdir()
    (folder / "acls").write_text(rules)
    command = [
        sys.executable, "-m", "segmentlog", "--dir", str(folder / "store"), "serve", "--listen", "127.0.0.1:0",
        "--partitions", "4", "--acls", str(folder / "acls"), *options,
    ]  # fmt: skip
    told = folder / "log"
    with open(told, "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: "listening on " in told.read_text())
            yield told.read_text().split("listening on ")[1].split()[0].rstrip(",")
        finally:
            process.terminate()


def run(
    tests: Path, folder: Path, address: str, number: str, names: Sequence[str], *, scenario: str = "default",
    part: str | None = None, protocol: str | None = None,
) -> None:  # fmt: skip
    """Run the tests of that number, and check that the given ones pass."""
    said = ""
    for attempt in range(_TRIES):
        config, report = folder / f"{attempt}.conf", folder / f"{attempt}.json"
        config.write_text(f"bootstrap.servers={address}\ntest.timeout.multiplier=3\n")
        more = {
            "TESTS": number, "TEST_SCENARIO": scenario, "BROKERS": address, "RDKAFKA_TEST_CONF": str(config),
            "TEST_REPORT": str(report),
        }  # fmt: skip
        more |= {"SUBTESTS": part} if part else {}
        more |= {"TEST_CONSUMER_GROUP_PROTOCOL": protocol} if protocol else {}
        done = subprocess.run(
            ["./test-runner", "-p1", "-Q", "-L"], cwd=tests, env=environment(tests, **more), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=600,
        )  # fmt: skip
        said = done.stdout
        if done.returncode == 0:
            states = {name: test["state"] for name, test in json.loads(report.read_text())["tests"].items()}
            assert {name: states[name] for name in names} == dict.fromkeys(names, "PASSED"), said[-4000:]
            assert part is None or f"{part}:" in said, "there is no such part"
            return
        print(f"attempt {attempt + 1} of {number}:\n{said[-4000:]}")
    pytest.fail(said[-4000:])


def by_number(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group the tests by number: those of one number run together."""
    found = defaultdict(list)
    for name in names:
        found[name.split("_")[0]].append(name)
    return sorted(found.items())


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Provide the address of a server of three workers."""
    with serving(tmp_path_factory.mktemp("librdkafka") / "s", _RULES, "--workers", "3") as address:
        yield address


def test_every_test_has_a_verdict(tests: Path) -> None:
    """Each test of the suite has exactly one verdict."""
    named = [*PASS, *PASS_WITHOUT_AUTO_CREATE, *REASONS]
    assert sorted(named) == sorted(tests_with_brokers(tests))


@pytest.mark.parametrize(("number", "names"), by_number(PASS))
def test_passes(tests: Path, workers: str, tmp_path: Path, number: str, names: list[str]) -> None:
    """The tests pass with three workers."""
    run(tests, tmp_path, workers, number, names)


@pytest.mark.parametrize(("number", "names"), by_number(NEW_GROUPS))
def test_passes_in_new_groups(tests: Path, workers: str, tmp_path: Path, number: str, names: list[str]) -> None:
    """The tests pass with `group.protocol=consumer` (KIP-848)."""
    run(tests, tmp_path, workers, number, names, protocol="consumer")


def test_passes_without_auto_create(tests: Path, tmp_path: Path) -> None:
    """The tests pass with a server that does not create topics by itself."""
    with serving(tmp_path / "s", _RULES, "--workers", "3", "--no-auto-create") as address:
        for number, names in by_number(PASS_WITHOUT_AUTO_CREATE):
            run(tests, tmp_path, address, number, names, scenario="noautocreate")


def test_administration(tests: Path, tmp_path: Path) -> None:
    """Each part passes for a user that may do everything: the rules that are listed are the tests' own."""
    with serving(tmp_path / "s", "super User:ANONYMOUS\n", "--workers", "1") as address:
        for part in ADMIN:
            run(tests, tmp_path, address, "0081", ["0081_admin"], part=part)
