"""Changes by the console's forms, and refused changes."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from console_shop import HOSTILE, Page
from doors import Client

from segmentlog.errors import InvalidConfig
from segmentlog.http.context import HttpContext
from segmentlog.http.settings import HttpSettings
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore


def test_a_configuration_is_changed_with_errors_beside_the_fields(store: LogStore, client: Client) -> None:
    """Only edited fields are changed, by the rules of `alter`, so that concurrent changes survive."""
    store.create_topic("t", config={"retention.ms": "1d"})
    was = {f"was:{line.key}": line.value for line in store.topic("t").config.describe()}
    given = {line.key: line.value for line in store.topic("t").config.describe()}
    bad = {**was, **given, "retention.ms": "soon", "segment.bytes": "1B", "fsync": "<b>"}
    answer = client.post("/ui/topics/t/config", data=bad)
    assert answer.status_code == 422
    for key in ("retention.ms", "segment.bytes", "fsync"):
        with pytest.raises(InvalidConfig) as refused:
            store.alter_topic("t", {key: bad[key]})
        beside = re.search(rf'<span class="fault" id="{re.escape(key)}-error">(.*?)</span>', answer.text)
        assert beside is not None
        assert Page(beside[1]).text == refused.value.accepted
        assert f'name="{key}" value="{bad[key].replace("<", "&lt;").replace(">", "&gt;")}"' in answer.text
    assert store.topic("t").config.to_mapping() == {"retention.ms": 86_400_000}
    store.alter_topic("t", {"segment.ms": "1h"})  # another user
    answer = client.post("/ui/topics/t/config", data={**was, **given, "retention.ms": "2d", "partitions": "3"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/topics/t?done=altered")
    assert "Configuration changed." in client.get(answer.headers["location"]).text
    assert store.topic("t").config.to_mapping() == {"retention.ms": 2 * 86_400_000, "segment.ms": 3_600_000}
    assert store.topic("t").partition_count == 3
    answer = client.post("/ui/topics/t/config", data={**was, **given, "partitions": "2"})
    assert answer.status_code == 422
    assert "partitions cannot be removed" in answer.text
    # Each value is valid alone, but not both together; changing one of them is refused for the other that is set.
    answer = client.post(
        "/ui/topics/t/config", data={**was, **given, "min.compaction.lag.ms": "2d", "max.compaction.lag.ms": "1d"}
    )
    assert answer.status_code == 422
    assert "min.compaction.lag.ms-error" in answer.text
    both = {"compression.type": "zstd", "compression.level": "19"}
    assert client.post("/ui/topics/t/config", data={**was, **given, **both}).status_code == 303
    assert store.topic("t").config.compression_level == 19
    answer = client.post("/ui/topics/t/config", data={**was, **given})
    assert answer.headers["location"].endswith("done=unchanged")


def test_a_topic_is_deleted_once_its_name_is_typed(store: LogStore, client: Client) -> None:
    """Any other text is refused."""
    store.create_topic("t")
    for name in ("", "T", "tt", "other"):
        answer = client.post("/ui/topics/t/delete", data={"name": name})
        assert answer.status_code == 422
        assert store.topics() == ["t"]
    assert client.post("/ui/topics/t/delete", data={"name": "t"}).status_code == 303
    assert store.topics() == []
    assert client.post("/ui/topics/t/delete", data={"name": "t"}).status_code == 404


def test_positions_are_moved_to_where_the_preview_said(store: LogStore, client: Client) -> None:
    """Groups of any name; refused while the group has members, or if the offsets are outside the log."""
    log = store.create_topic("t", 2).partition(0)
    log.append([b"x"] * 100)
    for name in ("plain", *HOSTILE, "new\r\nline", "a/b?c=d&e#f"):
        store.groups.reset(name, {TopicPartition("t", 0): 10, TopicPartition("t", 1): 0})
        quoted = quote(name, safe="")
        answer = client.get(f"/ui/groups/reset?quoted={quote(quoted)}&to=shift&where=%2B5")
        assert answer.status_code == 200, name
        page = Page(answer.text)
        moves = [attributes["value"] for tag, attributes in page.elements if attributes.get("name") == "move"]
        assert moves == ["t/0/15", "t/1/0"]
        (action,) = (attributes["action"] for tag, attributes in page.elements if attributes.get("method") == "post")
        assert store.groups.describe(name).partitions[0].committed.offset == 10  # type: ignore[union-attr]
        assert client.post(str(action), data={"move": moves}).status_code == 303
        assert store.groups.describe(name).partitions[0].committed.offset == 15  # type: ignore[union-attr]
    for move, status in (("t/0/101", 409), ("t/0/x", 400), ("t/7/0", 404), ("none/0/0", 404), ("", 400)):
        assert client.post("/ui/groups/reset?group=plain", data={"move": move}).status_code == status, move
    assert client.post("/ui/groups/reset?group=plain", data={}).status_code in (415, 422)
    with store.consumer("t", group="plain", follow=True) as consumer:
        consumer.poll_group()
        assert "1 member." in client.get("/ui/groups/reset?group=plain&to=earliest").text
        assert client.post("/ui/groups/reset?group=plain", data={"move": "t/0/1"}).status_code == 409


@pytest.mark.parametrize(
    ("target", "where", "expected"),
    [("earliest", "", 20), ("latest", "", 100), ("offset", "50", 50), ("offset", "7", 20), ("shift", "-30", 30),
     ("shift", "+999", 100), ("time", "@5000", 50)],
)  # fmt: skip
def test_the_preview_of_a_reset_keeps_to_the_log(
    store: LogStore, client: Client, target: str, where: str, expected: int
) -> None:
    """The preview clamps offsets to the log, as `groups reset` does."""
    log = store.create_topic("t", config={"retention.ms": "unlimited"}).partition(0)
    log.append([b"x"] * 100, timestamps=[100 * at for at in range(100)])
    log.trim(20)
    store.groups.reset("g", {TopicPartition("t", 0): 60})
    answer = client.get(f"/ui/groups/reset?group=g&to={target}&where={quote(where)}")
    assert f'value="t/0/{expected}"' in answer.text


@pytest.mark.parametrize(
    ("target", "where"), [("offset", "x"), ("offset", "-1h"), ("time", "5"), ("shift", "1.5"), ("time", "")]
)
def test_a_place_that_is_none_is_told_beside_its_field(
    store: LogStore, client: Client, target: str, where: str
) -> None:
    """An invalid target is an error beside its field, and the page has no form to confirm."""
    store.create_topic("t")
    store.groups.reset("g", {TopicPartition("t", 0): 0})
    answer = client.get(f"/ui/groups/reset?group=g&to={target}&where={quote(where)}")
    assert answer.status_code == 422
    assert 'id="where-error"' in answer.text
    assert 'method="post"' not in answer.text


def test_a_transaction_is_aborted_once_the_producers_name_is_typed(store: LogStore, client: Client) -> None:
    """Aborting an open transaction fences its producer."""
    store.create_topic("t")
    name = "nightly \u202e<b>"
    with store.producer(name=name) as producer:
        with pytest.raises(Exception, match=r"fenced|aborted"), producer.transaction():  # noqa: PT012
            producer.send("t", b"x")
            producer.flush()
            assert "Ongoing" in client.get("/ui/transactions").text
            path = f"/ui/transactions/abort?name={quote(name)}"
            assert client.post(path, data={"name": "nightly"}).status_code == 422
            assert store.transactions.states()[name].is_open
            assert client.post(path, data={"name": "nightly \\u202e<b>"}).headers["location"].endswith("done=aborted")
        assert not store.transactions.states()[name].is_open
        assert client.post(path, data={"name": name}).headers["location"].endswith("done=ended")
    assert client.post("/ui/transactions/abort?name=nobody", data={"name": "nobody"}).status_code == 404


def test_a_read_only_door_has_no_forms_and_takes_none(store: LogStore, read_only_client: Client) -> None:
    """A read-only server and a read-only store answer every form with 403, and nothing changes."""
    store.create_topic("t")
    store.groups.reset("g", {TopicPartition("t", 0): 0})
    for path in ("/topics/t", "/groups/group?group=g", "/transactions", "/"):
        answer = read_only_client.get(f"/ui{path}")
        assert answer.status_code == 200
        assert 'method="post"' not in answer.text
        assert "Change the configuration" not in answer.text
        assert "Change committed offsets" not in answer.text
        assert "Read-only" in answer.text
    for path in ("/topics/t/config", "/topics/t/delete", "/groups/reset?group=g", "/transactions/abort?name=x"):
        assert read_only_client.get(f"/ui{path}").status_code == 403
        answer = read_only_client.post(f"/ui{path}", data={"name": "t", "retention.ms": "1d", "move": "t/0/0"})
        assert answer.status_code == 403
        assert "--allow-writes" in answer.text
    assert store.topics() == ["t"]
    with (
        LogStore(store.path, read_only=True) as again,
        Client(HttpContext(again, HttpSettings(allow_writes=True))) as client,
    ):
        assert client.post("/ui/topics/t/delete", data={"name": "t"}).status_code == 403
        assert "Delete" not in client.get("/ui/topics/t").text


def test_forms_of_other_sites_change_nothing(store: LogStore, client: Client) -> None:
    """The browser's headers reveal where a form comes from."""
    store.create_topic("t")
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
        answer = client.post("/ui/topics/t/delete", data={"name": "t"}, headers=headers)
        assert answer.status_code == 403
    assert store.topics() == ["t"]


def test_forms_are_bounded(store: LogStore, client: Client) -> None:
    """Forms are limited in content type, size and number of fields."""
    store.create_topic("t")
    path = "/ui/topics/t/delete"
    assert client.post(path, json={"name": "t"}).status_code == 415
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post(path, content=b"a=" + b"x" * (3 << 20), headers=form).status_code == 413
    assert client.post(path, content=b"a&" * 30_000, headers=form).status_code == 400
    assert client.post(path, content=b"name=\xff", headers=form).status_code == 400
    assert store.topics() == ["t"]
