"""docs/ecosystem/mirror.md to the letter, while MirrorMaker and workers of the server are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from ecosystem.kafka.patient import PatientDriver
from ecosystem.kafka.programs import SCRIPTS, Broker, Tools
from ecosystem.mirror.mirroring import AGES_MS, PARTITIONS, by_partition, mirror, once, records
from ecosystem.mirror.recipe import Recipe
from server.clients.driver import WAIT_S, Got
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

from segmentlog.testing.ports import free_ports

pytestmark = pytest.mark.ecosystem
ROUNDS = 3
COUNT = 3000


def topics(driver: PatientDriver) -> list[str]:
    """Return the names of all topics."""
    admin = AdminClient({"bootstrap.servers": driver.bootstrap})
    return list(admin.list_topics(timeout=WAIT_S).topics)


def copied(driver: PatientDriver, topic: str) -> int:
    """Return the number of different records that were copied."""
    return len({one.timestamp for one in driver.read(topic, 0, committed=True)}) if topic in topics(driver) else 0


def kill_while_copying(
    flows: list[tuple[str, str, PatientDriver, PatientDriver]], settings: str, served: Served, start: Start,
    folder: Path,
) -> None:  # fmt: skip
    """Write records, and kill MirrorMaker and a worker during the last copies; MirrorMaker runs at the end."""
    for number in range(ROUNDS):
        for topic, _, source, _ in flows:
            source.write(topic, records(number * COUNT, (number + 1) * COUNT))
        copying = mirror(start, settings, folder)
        for topic, copy, _, target in flows:
            wait_until(lambda: copied(target, copy) > number * COUNT, f"{topic} is not copied")  # noqa: B023
        os.kill(served.workers()[number], signal.SIGKILL)
        copying.kill()
    mirror(start, settings, folder)


def test_both_ways(kafka: Broker, served: Served, tools: Tools, start: Start, tmp_path: Path) -> None:
    """Topics of each side are copied to the other under another name, complete and in order; groups continue there."""
    kafka.wait()
    recipe = Recipe("mirror.md", "Both ways", {"localhost:9092": served.address, "localhost:9192": kafka.address})
    (settings,) = recipe.files()
    ours, theirs = PatientDriver(served.address), PatientDriver(kafka.address)
    flows = [("planes", "segmentlog.planes", ours, theirs), ("flights", "kafka.flights", theirs, ours)]
    for topic, _, source, _ in flows:
        source.create(topic, PARTITIONS, {"retention.ms": AGES_MS})
    kill_while_copying(flows, settings, served, start, tmp_path)
    total = ROUNDS * COUNT
    for topic, copy, source, target in flows:
        wait_until(lambda: copied(target, copy) == total, f"not all of {topic} was copied")  # noqa: B023
        read = source.consume("readers", topic, total)
        # MirrorMaker translates no offsets from before its last start, so the group reads some records more.
        source.write(topic, records(total, total + COUNT))
        read += source.consume("readers", topic, COUNT // 2)
        wait_until(lambda: copied(target, copy) == total + COUNT, f"the rest of {topic} was not copied")  # noqa: B023
        found = target.read(copy, total + COUNT)
        assert once(by_partition(found)) == by_partition(records(0, total + COUNT))
        goes_on(target, copy, found, {one.timestamp for one in read})
        told = tools.run(
            SCRIPTS["kafka-configs.sh"], "--bootstrap-server", target.bootstrap, "--describe", "--topic", copy
        )
        assert f"retention.ms={AGES_MS} " in told.out
    # Nothing came back to where it was from.
    assert not [name for name in topics(ours) + topics(theirs) if "kafka" in name and "segmentlog.planes" in name]


def goes_on(target: PatientDriver, copy: str, found: list[Got], read: set[int]) -> None:
    """Check that the group's offsets at the other side come before all unread records, and not before all records."""
    wait_until(lambda: len(target.lag("readers", copy)) == PARTITIONS, f"no position in {copy} came")
    left, ends = target.lag("readers", copy), dict[int, int]()
    for one in found:
        ends[one.partition] = one.offset + 1

    def is_ahead(one: Got) -> bool:
        return one.offset >= ends[one.partition] - left[one.partition]

    ahead = {one.timestamp for one in found if is_ahead(one)}
    assert ahead >= {one.timestamp for one in found} - read
    assert any(not is_ahead(one) for one in found)


@pytest.mark.parametrize("way", ["out", "in"])
def test_each_record_once(way: str, kafka: Broker, served: Served, start: Start, tmp_path: Path) -> None:
    """Copied in transactions, at Kafka or here: each record once, in order, whatever is killed."""
    kafka.wait()
    addresses = {
        "localhost:9092": served.address, "localhost:9192": kafka.address, "localhost:8083": f"localhost:{free_ports()}"
    }  # fmt: skip
    (settings,) = Recipe("mirror.md", "Each record once", addresses).files()
    source, target = PatientDriver(served.address), PatientDriver(kafka.address)
    if way == "in":
        source, target = target, source
        there, back = "segmentlog->kafka.enabled", "kafka->segmentlog.enabled"
        settings = settings.replace(there, "here").replace(back, there).replace("here", back)
    source.create("flights", PARTITIONS, {"retention.ms": AGES_MS})
    kill_while_copying([("flights", "flights", source, target)], settings, served, start, tmp_path)
    total = ROUNDS * COUNT
    wait_until(lambda: copied(target, "flights") == total, "not all of it was copied")
    assert by_partition(target.read("flights", total, committed=True)) == by_partition(records(0, total))
