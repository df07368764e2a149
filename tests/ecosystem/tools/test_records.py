"""The console's producer and consumer, get-offsets, delete-records, the tools that measure and verify, dump-log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ecosystem.kafka.programs import Tools
from ecosystem.tools.conftest import Command
from waiting import wait_until

from segmentlog.store import LogStore

pytestmark = pytest.mark.xdist_group("tools")
CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
OFFSETS = "GetOffsetShell"


def test_the_console(do: Command, store: LogStore) -> None:
    """The consumer and the library get the typed keys, headers and nulls, with either protocol."""
    store.create_topic("t", 1)
    told = "h:a,i:b\tkey\tvalue\nh:c\tNULL\tvalue\nh:d\tkey\tNULL\n"
    reading = [word for one in ("parse.key=true", "parse.headers=true", "null.marker=NULL")
               for word in ("--reader-property", one)]  # fmt: skip
    do("ConsoleProducer", "--topic", "t", *reading, stdin=told)
    found = list(store.consumer("t"))
    assert [(one.key, one.value) for one in found] == [(b"key", b"value"), (None, b"value"), (b"key", None)]
    assert found[0].headers == (("h", b"a"), ("i", b"b"))
    printing = [word for one in ("print.key=true", "print.headers=true", "null.literal=NULL")
                for word in ("--formatter-property", one)]  # fmt: skip
    for protocol in ("classic", "consumer"):
        group = ("--group", protocol, "--command-property", f"group.protocol={protocol}")
        printed = do(CONSUMER, "--topic", "t", "--from-beginning", "--max-messages", 3, *printing, *group)
        assert printed == told
    # By partition and offset, and where nothing comes.
    printed = do(CONSUMER, "--topic", "t", "--partition", 0, "--offset", 1, "--max-messages", 1)
    assert printed == "value\n"
    assert do(CONSUMER, "--topic", "t", "--timeout-ms", 500) == ""


def test_offsets(do: Command, store: LogStore, tmp_path: Path) -> None:
    """Ends, beginnings, by time; what lies elsewhere, of which there is nothing but of a tiered topic."""
    store.create_topic("t", 2, config={"retention.ms": -1})
    with store.producer() as producer:
        for number in range(4):
            producer.send("t", b"%d" % number, partition=0, timestamp=1000 + number)
    store.topic("t").partition(0).trim(1)
    assert do(OFFSETS) == "t:0:4\nt:1:0\n"
    assert do(OFFSETS, "--topic", "t", "--time", "earliest") == "t:0:1\nt:1:0\n"
    assert do(OFFSETS, "--topic", "t", "--time", "earliest-local") == "t:0:1\nt:1:0\n"
    assert do(OFFSETS, "--topic", "t", "--time", "max-timestamp") == "t:0:3\n"
    assert do(OFFSETS, "--topic-partitions", "t:0", "--time", 1002) == "t:0:2\n"
    assert do(OFFSETS, "--topic", "t", "--time", "latest-tiered").strip() == ""
    assert do(OFFSETS, "--topic", "t", "--time", "earliest-pending-upload").strip() == ""
    config = {"segment.records": 2, "remote.storage.enable": True, "local.retention.ms": 0}
    log = store.create_topic("tiered", 1, config=config).partition(0)
    for number in range(5):
        log.append([b"%d" % number], ack="durable")
    store.ship(f"file://{tmp_path}/bucket")
    for wanted, offset in (("earliest-local", 4), ("latest-tiered", 4), ("earliest-pending-upload", 5)):
        assert do(OFFSETS, "--topic", "tiered", "--time", wanted) == f"tiered:0:{offset}\n"


def test_records_are_deleted(do: Command, store: LogStore, tmp_path: Path) -> None:
    """Records are deleted up to an offset or the end, but not beyond it, and not in a topic that is only compacted."""
    store.create_topic("t", 2)
    store.create_topic("compacted", 1, config={"cleanup.policy": "compact"})
    with store.producer() as producer:
        for number in range(8):
            producer.send("t", b"%d" % number, partition=number % 2)
    plan = tmp_path / "plan.json"

    def delete(*wanted: tuple[str, int, int]) -> str:
        partitions = [{"topic": topic, "partition": number, "offset": offset} for topic, number, offset in wanted]
        plan.write_text(json.dumps({"partitions": partitions, "version": 1}))
        return do("DeleteRecordsCommand", "--offset-json-file", plan)

    said = delete(("t", 0, 3), ("t", 1, -1))
    assert "partition: t-0\tlow_watermark: 3\n" in said
    assert "partition: t-1\tlow_watermark: 4\n" in said
    assert [record.value for record in store.consumer("t")] == [b"6"]
    assert "partition: t-0\terror: org.apache.kafka.common.errors.OffsetOutOfRangeException" in delete(("t", 0, 5))
    assert "PolicyViolationException" in delete(("compacted", 0, 0))


def test_what_measures_and_verifies(do: Command, store: LogStore) -> None:
    """All records arrive: plain, in transactions, and one by one."""
    store.create_topic("t", 2)
    load = ("--topic", "t", "--num-records", 1000, "--record-size", 100, "--throughput", -1)
    assert do("ProducerPerformance", *load).splitlines()[-1].startswith("1000 records sent, ")
    in_transactions = ("--transactional-id", "perf", "--transaction-duration-ms", 50)
    assert do("ProducerPerformance", *load, *in_transactions).splitlines()[-1].startswith("1000 records sent, ")
    assert len(list(store.consumer("t", isolation="read_committed"))) == 2000
    *_, row = do("ConsumerPerformance", "--topic", "t", "--num-records", 2000, "--timeout", 20000).splitlines()
    assert row.split(", ")[4] == "2000"
    store.create_topic("latency", 1)
    told = do("EndToEndLatency", "--topic", "latency", "--num-records", 20, "--producer-acks", "all",
              "--record-size", 50)  # fmt: skip
    assert "Percentiles: 50th = " in told
    store.create_topic("verified", 1)
    do("VerifiableProducer", "--topic", "verified", "--max-messages", 5)
    # Its last records go when its process ends, which does not end here, or a moment later.
    wait_until(lambda: len(list(store.consumer("verified"))) == 5, "not all of it came")
    told = do("VerifiableConsumer", "--topic", "verified", "--group-id", "v", "--max-messages", 5)
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert [one["count"] for one in events if one["name"] == "records_consumed"] == [5]
    (committed,) = [one for one in events if one["name"] == "offsets_committed"]
    assert committed["offsets"] == [{"topic": "verified", "partition": 0, "offset": 5}]


def test_files_are_not_kafkas(do: Command, tools: Tools, store: LogStore) -> None:
    """kafka-dump-log.sh reports that it cannot read a segment, and leaves it unchanged; `segmentlog dump` can."""
    store.create_topic("t", 1)
    do("ConsoleProducer", "--topic", "t", stdin="value\n")
    (log,) = Path(store.path, "t", "0").glob("*.log")
    before = log.read_bytes()
    ran = tools.run("DumpLogSegments", "--files", log, "--print-data-log")
    assert ran.status == 1
    assert "CorruptRecordException: Found record size 0 smaller than minimum record overhead (14)" in ran.err
    assert log.read_bytes() == before
    command = [sys.executable, "-m", "segmentlog", "dump", "--records", str(log)]
    assert "value" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
