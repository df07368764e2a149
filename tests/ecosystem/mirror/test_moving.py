"""docs/ecosystem/moving.md to the letter: to a Kafka cluster, and from one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from ecosystem.kafka.patient import PatientDriver
from ecosystem.kafka.programs import SCRIPTS, Broker, Tools
from ecosystem.mirror.mirroring import AGES_MS, PARTITIONS, by_partition, lags, mirror, records
from ecosystem.mirror.recipe import Recipe
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

from segmentlog.store import LogStore

TOPIC = "flights"
GROUPS = ("readers", "others")


def move(
    source: PatientDriver, target: PatientDriver, steps: list[list[str]], settings: str, tools: Tools,
    start: Start, folder: Path, served: Served,
) -> None:  # fmt: skip
    """Do the steps of the page while records come."""
    describe, count, count_there, describe_there = steps
    source.write(TOPIC, records(0, 1000))
    first = source.consume("readers", TOPIC, 1000)
    copying = mirror(start, settings, folder)  # 1
    source.write(TOPIC, records(1000, 3000))
    wait_until(lambda: f" {TOPIC} " in run(tools, describe_there), "no group came")
    os.kill(served.workers()[1], signal.SIGKILL)
    source.write(TOPIC, records(3000, 4000))
    assert not copying.has_ended
    # 2 and 3. The groups must read the records that were written last: MirrorMaker needs them to translate offsets.
    rest = source.consume("readers", TOPIC, 3000)
    assert by_partition(first + rest) == by_partition(records(0, 4000))
    source.consume("others", TOPIC, 4000)
    wanted = {(group, TOPIC, str(number)): "0" for group in GROUPS for number in range(PARTITIONS)}
    assert lags(run(tools, describe), GROUPS) == wanted
    # 4
    assert counted(tools, count) == 4000
    wait_until(lambda: counted(tools, count_there) == 4000, "not all of it came")
    # 5
    wait_until(lambda: lags(run(tools, describe_there), GROUPS) == wanted, "groups are not where they were")
    # 6
    copying.kill()
    assert by_partition(target.read(TOPIC, 4000)) == by_partition(records(0, 4000))
    target.write(TOPIC, records(4000, 4100))
    for group in GROUPS:
        assert by_partition(target.consume(group, TOPIC, 100)) == by_partition(records(4000, 4100))


def run(tools: Tools, command: list[str]) -> str:
    """Run a command of the page, and return its output."""
    script, *words = command
    ran = tools.run(SCRIPTS[script], *words)
    assert ran.status == 0, ran.said
    return ran.said


def counted(tools: Tools, command: list[str]) -> int:
    """Return the number of messages."""
    found = re.search(r"Processed a total of (\d+) messages", run(tools, command))
    assert found is not None
    return int(found[1])


@pytest.mark.long(minutes=1.5)
def test_out(kafka: Broker, served: Served, store: LogStore, tools: Tools, start: Start, tmp_path: Path) -> None:
    """The cluster then has each record once, each group at its offset, and the configurations that Kafka knows."""
    kafka.wait()
    recipe = Recipe("moving.md", "Out", {"localhost:9092": served.address, "localhost:9192": kafka.address})
    (settings,) = recipe.files()
    source, target = PatientDriver(served.address), PatientDriver(kafka.address)
    # Kafka has the first setting, has the second under another name, and does not have the third.
    source.create(
        TOPIC, PARTITIONS, {"retention.ms": "864000000000", "fsync": "2000ms", "record.ttl.ms": "864000000000"}
    )
    start_mirror, *steps = recipe.commands()
    assert start_mirror == ["connect-mirror-maker.sh", "out.properties"]
    move(source, target, steps, settings, tools, start, tmp_path, served)
    told = run(tools, ["kafka-configs.sh", "--bootstrap-server", kafka.address, "--describe", "--topic", TOPIC])
    assert f"retention.ms={AGES_MS} " in told
    assert "flush.ms=2000 " in told
    assert "record.ttl.ms" not in told


@pytest.mark.ecosystem
def test_in(kafka: Broker, served: Served, store: LogStore, tools: Tools, start: Start, tmp_path: Path) -> None:
    """Moving from a cluster to this server works the same way, and the library can use everything, offsets included."""
    kafka.wait()
    addresses = {"localhost:9092": served.address, "localhost:9192": kafka.address}
    (settings,) = Recipe("moving.md", "In", addresses).files()
    swapped = {"localhost:9092": kafka.address, "localhost:9192": served.address}
    _, *steps = Recipe("moving.md", "Out", swapped).commands()
    source, target = PatientDriver(kafka.address), PatientDriver(served.address)
    source.create(
        TOPIC, PARTITIONS,
        {"retention.ms": AGES_MS, "compression.type": "gzip", "compression.gzip.level": "5", "flush.ms": "2000"},
    )  # fmt: skip
    move(source, target, steps, settings, tools, start, tmp_path, served)
    config = store.topic(TOPIC).config
    assert config.retention_ms == int(AGES_MS)
    assert str(config.fsync) == "2000ms"
    assert (config.compression_type, config.compression_level) == ("gzip", 5)
    with store.producer() as producer:
        producer.send(TOPIC, b"the last")
    with store.consumer(TOPIC, group="readers") as consumer:
        assert [record.value for record in consumer] == [b"the last"]
