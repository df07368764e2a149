"""Access rules on the console's pages: which users see and change which things."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import httpx
import pytest
from doors import Client
from waiting import wait_until

from segmentlog.http.console import record_pages
from segmentlog.http.console.live_tail import LiveTail, TailUpdate
from segmentlog.http.context import HttpContext
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpSettings
from segmentlog.records import TopicPartition
from segmentlog.schemas.avro_values import AvroSerializer
from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import Operation, Principal, ResourceType
from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.store import LogStore


class _Rules(Authorizer):
    """An authorizer that allows a given set of operations."""

    def __init__(self, *allowed: tuple[Operation, ResourceType, str]) -> None:
        self.allowed = set(allowed)

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        return (operation, resource_type, name) in self.allowed


@pytest.fixture
def ruled(store: LogStore) -> Iterator[Callable[..., Client]]:
    """Provide clients that may perform the given operations only."""
    store.create_topic("open")
    store.create_topic("secret")
    for topic in ("open", "secret"):
        store.topic(topic).partition(0).append([f"value of {topic}".encode()])
    store.groups.reset("mine", {TopicPartition("open", 0): 0, TopicPartition("secret", 0): 0})
    store.groups.reset("theirs", {TopicPartition("open", 0): 0})
    with store.producer(name="their producer") as producer, producer.transaction():
        producer.send("secret", b"x")
    made: list[Client] = []

    def make(*allowed: tuple[Operation, ResourceType, str]) -> Client:
        made.append(Client(HttpContext(store, HttpSettings(allow_writes=True), _Rules(*allowed))))
        return made[-1]

    yield make
    for client in made:
        client.close()


_SEE = (Operation.DESCRIBE, ResourceType.TOPIC, "open")
_READ = (Operation.READ, ResourceType.TOPIC, "open")
_SEE_GROUP = (Operation.DESCRIBE, ResourceType.GROUP, "mine")


def test_what_somebody_may_not_see_is_on_no_page(ruled: Callable[..., Client]) -> None:
    """Hidden topics, groups and producers, and the store's folder, appear neither in lists nor where they are
    mentioned."""
    client = ruled(_SEE, _READ, _SEE_GROUP)
    for path in (
        "/",
        "/?internal=1",
        "/groups",
        "/groups/group?group=mine",
        "/transactions",
        "/damage",
        "/topics/open",
    ):
        text = client.get(f"/ui{path}").text
        assert "secret" not in text, path
        assert "theirs" not in text, path
        assert "their producer" not in text, path
        assert client.context.store.path not in text, path
    assert "1 partition of topics that you may not see" in client.get("/ui/groups/group?group=mine").text
    assert "You may not see it" in client.get("/ui/topics/open").text
    for path in ("/topics/secret", "/topics/secret/records", "/topics/secret/records/0/0", "/topics/secret/tail",
                 "/topics/secret/records/0/0/value", "/topics/secret/tail/events", "/topics/secret/partitions/0",
                 "/topics/nowhere", "/groups/group?group=theirs", "/groups/group?group=nobody"):  # fmt: skip
        answer = client.get(f"/ui{path}")
        assert answer.status_code == 403, path
        assert "value of" not in answer.text


def test_a_lag_is_of_what_one_may_see(store: LogStore, ruled: Callable[..., Client]) -> None:
    """Sums in the list of groups and on a group's page exclude partitions of hidden topics."""
    store.topic("secret").partition(0).append([b"x"] * 7000)
    client = ruled(_SEE, _READ, _SEE_GROUP)
    pages = [client.get(path).text for path in ("/ui/groups", "/ui/groups/group?group=mine")]
    assert "7,00" not in "".join(pages)
    assert '<dt>Lag</dt><dd>1 <span class="unit">record</span></dd>' in pages[1]
    assert "you may not see all of them" in pages[1]


def test_a_tail_ends_with_the_right_to_read(store: LogStore, ruled: Callable[..., Client]) -> None:
    """A live tail sends nothing more once the right to read is revoked."""
    client = ruled(_READ)
    rules = client.context.authorizer
    assert isinstance(rules, _Rules)
    timer = threading.Timer(0.3, rules.allowed.clear)
    timer.start()
    text = client.get("/ui/topics/open/tail/events").text
    timer.join()
    assert "event: begin" in text
    assert text.rstrip().splitlines()[-2] == "event: end"
    assert "may not read topic" in text


_CLICK = {"type": "record", "name": "Click", "fields": [{"name": "salary", "type": "int"}]}
_SEE_SCHEMAS = (Operation.READ, ResourceType.TOPIC, "_schemas")
_BY_SCHEMA = "path=salary+%3E+50000"


def test_a_search_decodes_only_for_those_who_may_see_schemas(store: LogStore, ruled: Callable[..., Client]) -> None:
    """Without that right, a search by path must not reveal fields and values of a decoded value."""
    with store.producer(serializer=AvroSerializer(store.schemas, _CLICK)) as producer:
        producer.send("open", {"salary": 60_000})
    link = "/ui/topics/open/records/0/1"
    for rights, is_found in (((_READ,), False), ((_READ, _SEE_SCHEMAS), True)):
        answer = ruled(*rights).get(f"/ui/topics/open/records?{_BY_SCHEMA}")
        assert answer.status_code == 200
        assert (link in answer.text) == is_found


def test_a_tail_decodes_only_for_those_who_may_see_schemas(
    store: LogStore, ruled: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right to see schemas is checked at each poll, so an open page loses it, too."""
    client = ruled(_READ, _SEE_SCHEMAS)
    rules = client.context.authorizer
    assert isinstance(rules, _Rules)
    looks: list[TailUpdate | None] = []
    poll = LiveTail.poll

    def send() -> None:
        with store.producer(serializer=AvroSerializer(store.schemas, _CLICK)) as producer:
            producer.send("open", {"salary": 60_000})

    def look_and_change(tail: LiveTail) -> TailUpdate | None:
        looks.append(poll(tail))
        if len(looks) == 1:
            rules.allowed.discard(_SEE_SCHEMAS)
            send()
        else:
            rules.allowed.clear()
        return looks[-1]

    monkeypatch.setattr(LiveTail, "poll", look_and_change)
    send()
    assert client.get(f"/ui/topics/open/tail/events?after=0:0&{_BY_SCHEMA}").status_code == 200
    assert [[one["offset"] for one in found.records] if found else None for found in looks] == [[1], []]


def test_to_see_a_topic_is_not_to_read_it(ruled: Callable[..., Client]) -> None:
    """Without the right to read, pages have no link to records, and requests for records are refused."""
    client = ruled(_SEE)
    text = client.get("/ui/topics/open").text
    assert "/ui/topics/open/records" not in text
    for path in ("records", "records/0/0", "records/0/0/value", "tail", "tail/events"):
        assert client.get(f"/ui/topics/open/{path}").status_code == 403


def test_changes_need_their_own_permission(store: LogStore, ruled: Callable[..., Client]) -> None:
    """A change requires a permission in addition to a server that allows writes."""
    producer = "their producer"
    forms = {
        "/topics/open/delete": {"name": "open"},
        "/topics/open/config": {"retention.ms": "1d"},
        "/groups/reset?group=mine": {"move": "open/0/1"},
        f"/transactions/abort?name={producer}": {"name": producer},
    }
    client = ruled(_SEE, _READ, _SEE_GROUP)
    for path, form in forms.items():
        assert client.get(f"/ui{path}").status_code == 403, path
        assert client.post(f"/ui{path}", data=form).status_code == 403, path
    for text in (client.get("/ui/topics/open").text, client.get("/ui/groups/group?group=mine").text):
        assert "Delete" not in text
        assert "Change committed offsets" not in text
    everything = ruled(
        _SEE, _READ, _SEE_GROUP, (Operation.ALTER_CONFIGS, *_SEE[1:]), (Operation.DESCRIBE_CONFIGS, *_SEE[1:]),
        (Operation.DELETE, *_SEE[1:]),
        (Operation.READ, *_SEE_GROUP[1:]), (Operation.WRITE, ResourceType.TRANSACTIONAL_ID, producer),
    )  # fmt: skip
    assert everything.post("/ui/groups/reset?group=mine", data={"move": "secret/0/1"}).status_code == 403
    assert everything.post("/ui/topics/open/config", data={"partitions": "5"}).status_code == 403  # that is ALTER
    for path, form in reversed(forms.items()):
        assert everything.get(f"/ui{path}").status_code == 200, path
        assert everything.post(f"/ui{path}", data=form).status_code == 303, path
    assert store.topics() == ["secret"]


def test_nobody_takes_all_tails(store: LogStore, serve: Callable[..., HttpServer], tmp_path: Path) -> None:
    """One user may open a quarter of all live tails. Each tail that ends makes room for another."""
    store.create_topic("open")
    users = str(tmp_path / "users.json")
    for name in ("ann", "bob"):
        add_user(users, name, "pw", iterations=4096)
    server = serve(security=Security(users=users))

    def follow(who: str) -> httpx.Response:
        asked = web.build_request("GET", "/ui/topics/open/tail/events")
        answer = web.send(asked, auth=(who, "pw"), stream=True)
        opened.callback(answer.close)
        return answer

    with (
        mock.patch.object(record_pages, "_TAILS_MAX", 4),
        httpx.Client(base_url=server.url, timeout=20) as web,
        ExitStack() as opened,
    ):
        first = follow("ann")
        coming = first.iter_bytes()  # which hangs up when it is forgotten
        next(coming)
        assert [first.status_code, follow("ann").status_code, follow("bob").status_code] == [200, 503, 200]
        first.close()
        wait_until(lambda: follow("ann").status_code == 200)
