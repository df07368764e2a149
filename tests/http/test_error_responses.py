"""Error responses contain neither the store's location nor details of unexpected errors."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from doors import Client

from segmentlog.errors import ObjectStoreError
from segmentlog.http.context import HttpContext
from segmentlog.http.settings import HttpSettings
from segmentlog.store import LogStore
from segmentlog.topics.topic_registry import Topics

V2_JSON = {"content-type": "application/vnd.kafka.json.v2+json"}
LINES = {"content-type": "text/plain"}
SEGMENT = "t/0/00000000000000000000.log"


@pytest.fixture
def damaged(store: LogStore) -> LogStore:
    """Provide a store whose topic `t` cannot be read from offset 1 on."""
    log = store.create_topic("t").partition(0)
    log.append([b"1"])
    log.append([b'"damaged"'])
    path = Path(store.path, SEGMENT)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"damaged", b"Damaged"))
    return store


def test_a_damage_report_does_not_contain_the_path_of_the_store(damaged: LogStore, client: Client) -> None:
    """Every interface reports topic, partition, file, byte and offset, but not the folder."""
    body = {"content-type": "application/vnd.kafka.v2+json"}
    made = {"name": "i", "format": "binary", "auto.offset.reset": "earliest"}
    instance = "/consumers/g/instances/i"
    assert client.post("/consumers/g", json=made, headers=body).status_code == 200
    subscribed = client.post(f"{instance}/subscription", json={"topics": ["t"]}, headers=body)
    assert subscribed.status_code == 204
    accept = {"accept": "application/vnd.kafka.binary.v2+json"}
    assert client.get(f"{instance}/records?timeout=50", headers=accept).status_code == 200
    texts = {
        path: client.get(path, headers=accept if path.startswith("/consumers") else {}).text
        for path in (
            f"{instance}/records?timeout=50",
            "/topics/t/partitions/0/records?offset=1",
            "/ui/topics/t/records",
            "/ui/topics/t/records/0/1",
            "/ui/topics/t/records/0/1/value",
        )
    }
    for path, text in texts.items():
        assert f"{SEGMENT}: damaged at byte" in text, (path, text)
        # A user with Describe on the cluster sees commands with the folder of the store.
        assert damaged.path not in text.replace(f"--dir {damaged.path}", ""), path
    assert client.delete(instance).status_code == 204


def _attempts(client: Client) -> dict[str, Any]:
    cluster = client.get("/v3/clusters").json()["data"][0]["cluster_id"]
    record = {"records": [{"value": 1}]}
    return {
        "produce": client.post("/topics/t", json=record, headers=V2_JSON),
        "lines": client.post("/topics/t/records", content=b"x", headers=LINES),
        "instance": client.post("/consumers/g", json={}, headers={"content-type": "application/vnd.kafka.v2+json"}),
        "v3": client.post(f"/v3/clusters/{cluster}/topics/t/records", json={"value": {"type": "JSON", "data": 1}}),
        "topic": client.post(f"/v3/clusters/{cluster}/topics", json={"topic_name": "new"}),
        "schema": client.post("/subjects/s/versions", json={"schema": '"string"'}),
    }


def test_a_read_only_store_does_not_say_where_it_is(store: LogStore, tmp_path: Path) -> None:
    """Errors of a read-only store contain neither its folder nor its URL."""
    store.create_topic("t").partition(0).append([b"1"])
    url = (tmp_path / "bucket").as_uri()
    store.ship(url)
    for options in ({"path": store.path, "read_only": True}, {"path": url}):
        with LogStore(**options) as opened, Client(HttpContext(opened, HttpSettings(allow_writes=True))) as client:  # type: ignore[arg-type]
            for name, answer in _attempts(client).items():
                assert answer.status_code == 403, (name, answer.text)
                for place in (opened.path, store.path, url, str(tmp_path)):
                    assert place not in answer.text, (name, answer.text)


def test_only_paths_are_taken_out(store: LogStore) -> None:
    """A group name that ends in the path of the store is not changed."""
    context = HttpContext(store)
    assert context.redact_paths(f"{store.path}/t/0: damaged, see {store.path}.") == "t/0: damaged, see the store."
    assert context.redact_paths(f"'{store.path}': gone") == "'the store': gone"
    assert context.redact_paths(f"group 'etl{store.path}'") == f"group 'etl{store.path}'"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("the secret of /etc/passwd"), "internal error"),
        (OSError(5, "Input/output error", "/etc/passwd"), "internal error: Input/output error"),
        (ObjectStoreError("s3://secret/a", "get s3://secret/a/x", "timed out"), "the object store: get"),
    ],
)
def test_unexpected_errors_are_described_in_the_log_only(
    store: LogStore, client: Client, error: Exception, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer contains nothing of the paths, the URL or the message that an unexpected error has."""
    store.create_topic("t").partition(0).append([b"1"])
    with mock.patch.object(Topics, "topic", side_effect=error):
        for path in ("/topics/t/partitions/0/records", "/v3/clusters", "/topics/t", "/ui/topics/t", "/subjects"):
            answer = client.get(path)
            assert "secret" not in answer.text, path
            assert "passwd" not in answer.text, path
            if path == "/topics/t":
                assert answer.status_code in (500, 502)
                assert expected in answer.text
    assert "passwd" in caplog.text or isinstance(error, ObjectStoreError)
