"""librdkafka with its test suite: fetched as part of an npm package, and built once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from server.clients.fetching import Missing, fetched
from server.clients.java_driver import class_path

_HERE = Path(__file__).parent
_PACKAGE = "@confluentinc/kafka-javascript@1.10.1"  # librdkafka 2.15.1
_ONE_COPY = [
    ("rd_kafka_NewTopic_new(topicname, partition_cnt, replication_factor,",
     "rd_kafka_NewTopic_new(topicname, partition_cnt, 1,"),
    ("            topicname, replication_factor, partition_cnt);", "            topicname, 1, partition_cnt);"),
]  # fmt: skip
"""The tests' own topics have three copies; there is one here."""


@cache
def suite() -> Path:
    """Return the folder ``tests`` of librdkafka, with its ``test-runner``. Raises `Missing`."""
    tools = ["npm", "make", "gcc", "g++", "apt-get", "dpkg", "java", "javac", "mvn"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise Missing(f"librdkafka's tests need {', '.join(missing)}")
    return fetched("librdkafka", [Path(__file__), _HERE / "tools" / "pom.xml"], _make) / "tests"


def _make(folder: Path) -> None:
    def run(*words: str, cwd: Path = folder) -> None:
        subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True, timeout=1800)

    run("npm", "pack", "--silent", _PACKAGE)
    (archive,) = folder.glob("*.tgz")
    run("tar", "-xzf", archive.name, "--strip-components=3", "package/deps/librdkafka")
    run("apt-get", "download", "rapidjson-dev")  # four tests look into statistics with it
    (package,) = folder.glob("*.deb")
    run("dpkg", "-x", package.name, "rapidjson")
    source = folder / "tests" / "test.c"
    text = source.read_text()
    for before, after in _ONE_COPY:
        assert before in text, before
        text = text.replace(before, after)
    source.write_text(text)
    for script in ("configure", "lds-gen.py", "tests/java/run-class.sh"):
        (folder / script).chmod(0o755)
    options = ["--disable-gssapi", "--disable-curl", "--disable-zstd", "--disable-optimization"]
    run("./configure", *options, f"--CPPFLAGS=-I{folder}/rapidjson/usr/include")
    with open(folder / "config.h", "a") as config:
        # Configure does not find it, because it treats a warning as an error.
        config.write("#define WITH_RAPIDJSON 1\n")
    run("make", "-j2", "libs")
    run("make", "-j2", "-C", "tests", "test-runner")
    _make_kafka(folder)


def _make_kafka(folder: Path) -> None:
    """Create three commands that the tests consider an installation of Kafka."""
    classes = class_path(_HERE / "tools")
    programs = sorted((folder / "tests" / "java").glob("*.java"))
    command = ["javac", "-nowarn", "-cp", classes, *map(str, programs)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    start = f'exec java -XX:TieredStopAtLevel=1 -Xmx256m -cp "${{CLASSPATH:-.}}":{shlex.quote(classes)}'
    tools = "org.apache.kafka.tools"
    # The tests write records with timestamps of 2009. Kafka applies retention every five minutes, this server sooner.
    old = 'case "$*" in *--create*) set -- "$@" --config retention.ms=-1 ;; esac\n'
    scripts = {
        "kafka-run-class.sh": f'{start} "$@"\n',
        "kafka-topics.sh": f'{old}{start} {tools}.TopicCommand "$@"\n',
        "kafka-acls.sh": f'{start} {tools}.AclCommand "$@"\n',
    }
    (folder / "kafka" / "bin").mkdir(parents=True)
    for name, script in scripts.items():
        path = folder / "kafka" / "bin" / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)


def tests_with_brokers(tests: Path) -> set[str]:
    """The names of those that need a server, as the suite itself lists them."""
    table = (tests / "test.c").read_text().split("struct test tests[] = {")[1].split("{NULL}")[0]
    found = re.findall(r"_TEST\((\w+),\s*([^,)]+)", table)
    return {name for name, flags in found if "TEST_F_LOCAL" not in flags}


def environment(tests: Path, **more: str) -> dict[str, str]:
    """Return the environment of the runner."""
    libraries = f"{tests.parent}/src:{tests.parent}/src-cpp"
    settings = {
        "LD_LIBRARY_PATH": libraries,
        "KAFKA_PATH": str(tests.parent / "kafka"),
        "TEST_KAFKA_VERSION": "4.4.0",
    }
    return {key: value for key, value in os.environ.items() if key != "CI"} | settings | more
