"""Counts and lags after a restore: every place that shows one leaves the lost ranges out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.processes import finish
from doors import Client
from server.scraping import scrape, value

import segmentlog
from segmentlog.http.context import HttpContext
from segmentlog.http.settings import HttpSettings
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.records import TopicPartition
from segmentlog.spark.query_lag import measure_lag
from segmentlog.store import LogStore

RECORDS = 73
GROUP = "billing"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a restored store: 73 records in words/0, all read by the group, none in words/1; each has a lost range."""
    bucket = f"file://{tmp_path}/bucket"
    with segmentlog.open(tmp_path / "first", background=False) as first:
        first.create_topic("words", 2).partition(0).append([b"%d" % number for number in range(RECORDS)])
        first.open_partition("words", 1)
        first.groups.reset(GROUP, {TopicPartition("words", 0): RECORDS, TopicPartition("words", 1): 0})
        first.ship(bucket)
    restore(open_bucket(bucket), str(tmp_path / "restored"))
    with segmentlog.open(tmp_path / "restored", background=False) as restored:
        for partition in restored.topic("words").partitions():
            (lost,) = partition.lost_ranges()
            assert lost.end_offset - lost.base_offset > 500_000
        yield restored


def test_lag_of_the_library(store: LogStore) -> None:
    """A consumer and `groups.describe` count what can be read: first everything, then nothing, then one new record."""
    tp = TopicPartition("words", 0)
    with store.consumer("words") as consumer:
        assert consumer.lag() == {tp: RECORDS, TopicPartition("words", 1): 0}
        assert len(list(consumer)) == RECORDS
        assert set(consumer.lag().values()) == {0}
    assert [one.lag for one in store.groups.describe(GROUP).partitions] == [0, 0]
    store.open_partition(*tp).append([b"new"])
    assert [one.lag for one in store.groups.describe(GROUP).partitions] == [1, 0]
    with store.consumer("words", group=GROUP) as consumer:
        assert [record.value for record in consumer] == [b"new"]


def test_lag_with_ends_that_the_caller_knows(store: LogStore) -> None:
    """`end_of` alone is enough: `describe` looks the lost ranges up; with `lost_of` it takes the caller's."""

    def end_of(tp: TopicPartition) -> int:
        return store.open_partition(*tp).log_end_offset

    assert [one.lag for one in store.groups.describe(GROUP, end_of).partitions] == [0, 0]
    assert all(one.lag > 500_000 for one in store.groups.describe(GROUP, end_of, lambda _: ()).partitions)


def test_counts_and_lags_on_the_command_line(store: LogStore) -> None:
    """`topics`, `groups list` and `groups describe` count no lost offsets."""

    def rows(*args: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in finish(Path(store.path), *args, "--json").stdout.splitlines()]

    assert rows("topics") == [{"topic": "words", "partitions": 2, "offsets": RECORDS}]
    assert [one["lag"] for one in rows("groups", "list")] == [0]
    (group,) = rows("groups", "describe", GROUP)
    assert [one["lag"] for one in group["partitions"]] == [0, 0]  # type: ignore[index]


def test_lags_of_the_rest_interface(store: LogStore) -> None:
    """`lags` and `lag-summary` of Confluent's v3; a consumer of v2 has nothing waiting."""
    with Client(HttpContext(store, HttpSettings(allow_writes=True))) as client:
        (cluster,) = client.get("/v3/clusters").json()["data"]
        groups = f"/v3/clusters/{cluster['cluster_id']}/consumer-groups/{GROUP}"
        assert [one["lag"] for one in client.get(f"{groups}/lags").json()["data"]] == [0, 0]
        summary = client.get(f"{groups}/lag-summary").json()
        assert (summary["max_lag"], summary["total_lag"]) == (0, 0)


def test_counts_and_lags_of_the_console(store: LogStore) -> None:
    """The list of topics counts 73 offsets, by that name; the groups and the preview of a reset have no lag."""
    with Client(HttpContext(store, HttpSettings(allow_writes=True))) as client:
        topics = client.get("/ui/").text
        assert re.search(r">\s*Offsets\s*<", topics)
        for path in ("/", "/topics/words", "/groups", f"/groups/group?group={GROUP}"):
            page = client.get(f"/ui{path}")
            assert page.status_code == 200, path
            if path.startswith("/groups"):
                # Large numbers are offsets and ends only, and only the group's page shows them.
                ends = {f"{one.log_end_offset:,}" for one in store.topic("words").partitions()}
                assert set(re.findall(r"\d,\d{3},\d{3}", page.text)) <= (ends if "group=" in path else set()), path
        assert re.search(rf'\b{RECORDS} <span class="unit">offsets<', topics)
        page = client.get(f"/ui/groups/reset?group={GROUP}&to=earliest").text
        assert re.findall(r'<td class="n">([\d,]+)</td></tr>', page) == [str(RECORDS), "0"]


def test_lags_of_the_metrics(store: LogStore) -> None:
    """In Prometheus, lost ranges count neither as lag nor as unshipped records."""
    with segmentlog.serve(store, port=0, metrics="127.0.0.1:0") as server:
        assert server.metrics_address is not None
        found = scrape(server.metrics_address)
    for number in (0, 1):
        assert value(found, "segmentlog_group_lag", group=GROUP, topic="words", partition=number) == 0


def test_what_is_shipped_has_no_lost_ranges(store: LogStore, tmp_path: Path) -> None:
    """The first ship of a restored store reports its records: 73, and two commits."""
    assert store.ship(f"file://{tmp_path}/other").records == RECORDS + 2


def test_what_waits_to_be_shipped_has_no_lost_ranges(store: LogStore, tmp_path: Path) -> None:
    """Right after a takeover the metric counts the records of the log, until the next cycle confirms them."""
    take_over(open_bucket(f"file://{tmp_path}/bucket"), str(tmp_path / "taken"))
    with segmentlog.open(tmp_path / "taken", background=False) as taken:
        assert taken.open_partition("words", 0).log_end_offset > 500_000
        with segmentlog.serve(taken, port=0, metrics="127.0.0.1:0") as server:
            assert server.metrics_address is not None
            found = scrape(server.metrics_address)
    assert value(found, "segmentlog_partition_unshipped_records", topic="words", partition=0) == RECORDS


def test_how_far_a_query_of_spark_is_behind(store: LogStore) -> None:
    """A query that stopped before the lost range has nothing to do, in offsets and in bytes."""
    logs = store.topic("words").partitions()
    ids = {"id": store.topic("words").id}
    latest = {"words": {str(log.number): log.log_end_offset for log in logs} | ids}
    for position, waiting in ((RECORDS, 0), (0, RECORDS)):
        progress = {
            "sources": [
                {
                    "endOffset": json.dumps({"words": {"0": position, "1": 0} | ids}),
                    "latestOffset": json.dumps(latest),
                }
            ]
        }
        found = measure_lag(progress, store.path)
        assert found.total == waiting
        assert bool(found.size_bytes) == bool(waiting)
