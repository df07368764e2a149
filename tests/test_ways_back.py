"""Every record that a Kafka client may send comes back unchanged from every kind of copy.

Nulls and empty keys and values, no timestamp (-1), 0 and the largest, a header twice and with null, 10 MiB.
Spark's ways are in `spark/test_ways_back.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from doors import Client
from hypothesis import HealthCheck, example, given, settings
from objects.buckets import Memory
from round_trip import LARGE, PARTITIONS, Sent, all_kinds, by_partition, content, fill, records

from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.http.context import HttpContext
from segmentlog.http.settings import HttpSettings
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore

NDJSON: Final = "application/x-ndjson"
V2: Final = "application/vnd.kafka.v2+json"
V2_BINARY: Final = "application/vnd.kafka.binary.v2+json"


class Place:
    """A store with a topic for each trip."""

    def __init__(self, folder: Path, store: LogStore, client: Client) -> None:
        self.folder, self.store, self.client = folder, store, client
        self._numbers = count()

    def there(self, sent: Sequence[Sent]) -> tuple[str, str]:
        """(topic with these records, topic without any)."""
        number = next(self._numbers)
        names = f"from-{number}", f"to-{number}"
        for name, some in zip(names, (sent, ()), strict=True):
            fill(self.store, name, some)
        return names

    def cli(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Run a command, which must succeed, and return what it prints."""
        command = [sys.executable, "-m", "segmentlog", "--dir", self.store.path, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Yield the store from which all round trips start, with its clients."""
    with LogStore(tmp_path / "store") as store, Client(HttpContext(store, HttpSettings(allow_writes=True))) as client:
        yield Place(tmp_path, store, client)


# ---------------------------------------------------------------- the ways


def by_file(ending: str) -> Callable[[Place, str, str], None]:
    """`segmentlog export` and `import`."""

    def copy(place: Place, source: str, target: str) -> None:
        file = str(place.folder / f"{source}.{ending}")
        for arguments in (["export", source, file], ["import", file, target]):
            assert run(cli, ["--dir", place.store.path, *arguments]) == 0

    return copy


def by_lines(place: Place, source: str, target: str) -> None:
    """REST's lines of one topic as records of another."""
    for number in range(PARTITIONS):
        got = place.client.get(f"/topics/{source}/partitions/{number}/records?offset=0", headers={"accept": NDJSON})
        put = place.client.post(
            f"/topics/{target}/records?form=records", content=got.content, headers={"content-type": NDJSON}
        )
        assert (got.status_code, put.status_code) == (200, 200), put.text


def by_json(place: Place, source: str, target: str) -> None:
    """`segmentlog consume --json` and `produce --format json`."""
    place.cli("produce", "--format", "json", target, stdin=place.cli("consume", "--json", source))


def by_v3(place: Place, source: str, target: str) -> None:
    """Copy the records through REST v3, with times in ISO 8601."""

    def data(blob: bytes | None) -> Any:
        return None if blob is None else {"type": "BINARY", "data": b64encode(blob).decode()}

    body = []
    for one in content(place.store, source):
        headers = [
            {"name": name, "value": None if blob is None else b64encode(blob).decode()} for name, blob in one.headers
        ]
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=one.timestamp)
        body.append(
            {"partition_id": one.partition, "key": data(one.key), "value": data(one.value), "headers": headers,
             "timestamp": moment.isoformat()}
        )  # fmt: skip
    cluster = place.client.get("/v3/clusters").json()["data"][0]["cluster_id"]
    answer = place.client.post(
        f"/v3/clusters/{cluster}/topics/{target}/records", content="".join(map(json.dumps, body)),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert answer.text.count('"error_code":200') == len(body), answer.text[:1000]


def by_v2(place: Place, source: str, target: str) -> None:
    """Consume the records through REST v2, and produce their keys and values."""
    made = place.client.post(
        f"/consumers/{source}", json={"format": "binary", "auto.offset.reset": "earliest"}, headers={"content-type": V2}
    ).json()
    uri = made["base_uri"].removeprefix("http://localhost")
    partitions = [{"topic": source, "partition": number} for number in range(PARTITIONS)]
    place.client.post(f"{uri}/assignments", json={"partitions": partitions}, headers={"content-type": V2})
    place.client.post(f"{uri}/positions/beginning", json={"partitions": partitions}, headers={"content-type": V2})
    while found := place.client.get(f"{uri}/records?timeout=50", headers={"accept": V2_BINARY}).json():
        some = [{name: one[name] for name in ("key", "value", "partition")} for one in found]
        answer = place.client.post(f"/topics/{target}", json={"records": some}, headers={"content-type": V2_BINARY})
        assert answer.status_code == 200, answer.text
    assert place.client.delete(uri).status_code == 204


WAYS: Final[dict[str, Callable[[Place, str, str], None]]] = {
    "ndjson": by_file("ndjson"),
    "parquet": by_file("parquet"),
    "csv": by_file("csv"),
    "lines": by_lines,
    "json": by_json,
    "v3": by_v3,
    "v2": by_v2,
}


def fits(way: str, one: Sent) -> bool:
    """Return whether a way can carry such a record: CSV is text, and calendars end with the year 9999."""
    if way == "v3":
        return one.timestamp < 253_402_300_800_000
    if way != "csv":
        return True
    try:
        return all(blob is None or blob.decode() is not None for blob in (one.key, one.value))
    except UnicodeDecodeError:
        return False


def check(place: Place, way: str, sent: Sequence[Sent]) -> None:
    """Copy the records to another topic and compare both."""
    sent = [one for one in sent if fits(way, one)]
    source, target = place.there(sent)
    WAYS[way](place, source, target)
    before, after = content(place.store, source), content(place.store, target)
    if way == "v2":  # which has neither
        before, after = ([one._replace(timestamp=0, headers=()) for one in some] for some in (before, after))
    assert after == before == ([one._replace(timestamp=0, headers=()) for one in by_partition(sent)] if way == "v2"
                               else by_partition(sent))  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_record(place: Place, way: str) -> None:
    """Each key comes with each value, timestamp and list of headers, and a value of 10 MiB where it fits a text."""
    large = LARGE._replace(value=b"ab" * (5 << 20)) if way == "csv" else LARGE
    check(place, way, [*all_kinds(), large])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "json"])  # processes of its own
@given(sent=records)
@example(sent=[Sent(0, -1, None, b"only one without a timestamp", ())])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_record(place: Place, way: str, sent: list[Sent]) -> None:
    """Any record that the way can carry comes back, alone and among others."""
    check(place, way, sent)


def test_shipped_and_restored(tmp_path: Path) -> None:
    """Segments in an object store are the same records."""
    sent = [*all_kinds(), LARGE]
    with LogStore(tmp_path / "store", background=False) as store:
        fill(store, "t", sent)
        for log in store.topic("t").partitions():
            log.flush()  # only durable records are shipped
        bucket = Memory()
        shipper = Shipper(store._topics, bucket, parallel=0)
        shipper.ship()
        shipper.close()
    restore(bucket, str(tmp_path / "back"), parallel=0)
    with LogStore(tmp_path / "back", background=False) as store:
        assert content(store, "t") == by_partition(sent)
