"""Names with slashes, dots, percent signs and other scripts can be part of a path."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from segmentlog.http.rest.v3.v3_links import cluster_id_of
from segmentlog.http.serving import HttpServer
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

NAMES = [
    "team/a", "//", ".", "..", "%2F", "a%2fb%", "a b+c:d?e=f#g", "-", "lags/a/instances/b", "ü/日本",
    "a\nb\\'\"<&>", "x" * 255,
]  # fmt: skip
V2 = {"content-type": "application/vnd.kafka.v2+json"}


def one_segment(name: str) -> str:
    """Return a name escaped by a client for a path."""
    return quote(name, safe="").replace(".", "%2E")


def links(document: Any) -> Iterator[str]:
    """Return every address in a response."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in ("self", "related") and value:
                yield value
            else:
                yield from links(value)
    elif isinstance(document, list):
        for value in document:
            yield from links(value)


def test_an_instance_of_any_group_and_name(store: LogStore, web: httpx.Client) -> None:
    """An instance works under the returned address and under one that the client escapes."""
    store.create_topic("t").partition(0).append([b"1"])
    for name in NAMES:
        use_instance(web, name)
    assert sorted(store.groups.names()) == sorted(NAMES)


def use_instance(web: httpx.Client, name: str) -> None:
    """Use an instance whose name is also the name of its group."""
    made = []
    for instance in (name, f"{name}2"[-255:]):
        answer = web.post(
            f"/consumers/{one_segment(name)}", headers=V2,
            json={"name": instance, "format": "json", "auto.offset.reset": "earliest"},
        )  # fmt: skip
        assert (answer.status_code, answer.json().get("instance_id")) == (200, instance), answer.text
        made.append(answer.json()["base_uri"])
    uri = f"/consumers/{one_segment(name)}/instances/{one_segment(name)}"
    assert web.post(f"{uri}/subscription", headers=V2, json={"topics": ["t"]}).status_code == 204
    assert web.get(f"{made[0]}/subscription").json() == {"topics": ["t"]}
    assert web.get(f"{made[1]}/subscription").json() == {"topics": []}
    wanted = {"accept": "application/vnd.kafka.json.v2+json"}
    assert [one["value"] for one in web.get(f"{uri}/records?timeout=5000", headers=wanted).json()] == [1]
    assert web.post(f"{uri}/offsets", headers=V2).status_code == 200
    asked = web.request("GET", f"{uri}/offsets", headers=V2, json={"partitions": [{"topic": "t", "partition": 0}]})
    assert asked.json()["offsets"][0]["offset"] == 1
    assert web.delete(uri).status_code == 204
    assert web.delete(uri).status_code == 404
    assert web.delete(made[1]).status_code == 204


def test_any_group_and_what_it_links_to(store: LogStore, http_server: HttpServer, web: httpx.Client) -> None:
    """In version 3, every link of a group, its lags and its members works."""
    store.create_topic("t").partition(0).append([b"1", b"2"])
    for name in NAMES:
        follow_links(store, http_server, web, name)


def follow_links(store: LogStore, http_server: HttpServer, web: httpx.Client, name: str) -> None:
    """Follow the links of a group of that name."""
    store.groups.reset(name, {TopicPartition("t", 0): 1})
    made = web.post(f"/consumers/{one_segment(name)}", headers=V2, json={"name": name, "format": "json"}).json()
    assert web.post(f"{made['base_uri']}/subscription", headers=V2, json={"topics": ["t"]}).status_code == 204
    root = f"{http_server.url}/v3/clusters/{cluster_id_of(store.store_id)}/consumer-groups"
    to_ask = [f"{root}/{one_segment(name)}", f"{root}/{one_segment(name)}/lags"]
    answers: dict[str, Any] = {}
    while to_ask:
        address = to_ask.pop()
        if address not in answers and "/brokers/" not in address and "/topics/" not in address:
            answer = web.get(address)
            assert answer.status_code == 200, (address, answer.text)
            answers[address] = answer.json()
            to_ask += links(answers[address])
    of_group = [one for one in answers.values() if "consumer_group_id" in one]
    assert {one["consumer_group_id"] for one in of_group} == {name}
    assert {"KafkaConsumerGroup", "KafkaConsumerGroupLagSummary", "KafkaConsumerLagList", "KafkaConsumerList"} <= {
        one["kind"] for one in answers.values()
    }
    (summary,) = (one for one in answers.values() if one["kind"] == "KafkaConsumerGroupLagSummary")
    assert summary["max_lag"] == 1
    (member,) = store.groups.describe(name).members
    consumer = web.get(f"{root}/{one_segment(name)}/consumers/{one_segment(member.id)}")
    assert consumer.json()["consumer_id"] == member.id


def test_any_subject_of_the_registry(web: httpx.Client) -> None:
    """A subject with escaped slashes is never mistaken for a version of another subject."""
    for name in (*NAMES[:-2], "a/versions", "a/versions/1", "versions", "s/config"):
        use_subject(web, name)


def use_subject(web: httpx.Client, name: str) -> None:
    """Use a subject from its first version to its deletion."""
    schema = {"schema": '"string"'}
    at = f"/subjects/{one_segment(name)}"
    first = web.post(f"{at}/versions", json=schema).json()["version"]
    assert web.post(at, json=schema).json()["subject"] == name
    assert web.get(f"{at}/versions").json() == [first]
    assert web.get(f"{at}/versions/{first}").json()["subject"] == name
    assert web.get(f"{at}/versions/latest/schema").json() == "string"
    assert web.post(f"/compatibility{at}/versions/latest", json=schema).json() == {"is_compatible": True}
    assert web.put(f"/config/{one_segment(name)}", json={"compatibility": "NONE"}).status_code == 200
    assert web.get(f"/config/{one_segment(name)}").json() == {"compatibilityLevel": "NONE"}
    assert web.get("/subjects").json() == [name]
    assert web.delete(f"{at}/versions/{first}").json() == first
    assert web.get("/subjects").json() == []
    assert web.post(f"{at}/versions", json=schema).status_code == 200
    assert web.delete(at).json() == [first + 1]
    assert web.get("/subjects").json() == []


def test_slashes_of_a_subject_may_be_written_as_they_are(web: httpx.Client) -> None:
    """Some clients do not escape slashes in subjects."""
    assert web.post("/subjects/team/a/versions", json={"schema": '"string"'}).json()["id"] == 1
    assert web.get("/subjects").json() == ["team/a"]
    assert web.get("/subjects/team/a/versions/1").json()["subject"] == "team/a"


def test_a_path_that_is_no_text_names_nothing(http_server: HttpServer) -> None:
    """A path that is not UTF-8 gets 400."""
    for path in ("/consumers/%ff", "/consumers/a%2f%c3/instances/x", "/subjects/%80/versions"):
        answer = httpx.post(f"{http_server.url}{path}", headers=V2, json={})
        assert (answer.status_code, answer.json()["message"]) == (400, "the path of the request is not UTF-8")


def test_the_console_links_to_any_group(store: LogStore, web: httpx.Client) -> None:
    """The console links to the group's page and to its form."""
    store.create_topic("t").partition(0).append([b"1", b"2"])
    for name in NAMES:
        store.groups.reset(name, {TopicPartition("t", 0): 1})
    page = web.get("/ui/groups").text
    found = {html.unescape(one) for one in re.findall(r'href="(/ui/groups/group[^"]*)"', page)}
    assert len(found) == len(NAMES)
    forms = set()
    for link in found:
        group = web.get(link)
        assert group.status_code == 200
        (link,) = {html.unescape(one) for one in re.findall(r'href="(/ui/groups/reset[^"]*)"', group.text)}
        (quoted,) = re.findall(r'name="quoted" value="([^"]*)"', web.get(link).text)
        forms.add(html.unescape(quoted))
    assert forms == {quote(name, safe="") for name in NAMES}
