"""A user with one right sees what the right covers, and nothing else: on every page and at every endpoint."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from rights_world import CONFIG, GROUP, NAME, SCHEMA_TEXT, SECRETS, TOPIC, USERS, VALUE, World, fill, principal, shown
from starlette.routing import Mount

from segmentlog.http.app import make_app
from segmentlog.http.console import Console
from segmentlog.http.context import HttpContext
from segmentlog.http.middleware import TLS_PRINCIPAL
from segmentlog.http.rest.v3.v3_links import cluster_id_of
from segmentlog.http.settings import HttpSettings

_JSON = b"application/json"
_V2, _BINARY, _AVRO = (f"application/vnd.kafka.{name}v2+json".encode() for name in ("", "binary.", "avro."))
_FORM = b"application/x-www-form-urlencoded"
_WITHIN_S = 20.0
_TOPICS = ("open", "hidden-topic", "__consumer_offsets", "__transaction_state", "_schemas")
_GROUPS = ("open-group", "hidden-group")

QUERIES: dict[str, tuple[str, ...]] = {
    "/ui/": ("", "internal=1"),
    "/ui/groups/group": tuple(f"group={name}" for name in _GROUPS),
    "/ui/groups/reset": tuple(f"group={name}&to=latest" for name in _GROUPS),
    "/ui/transactions/abort": ("name=open-txn", "name=hidden-txn", "name=hidden-producer"),
    "/ui/topics/{topic}/records": ("at=start",),
    "/ui/topics/{topic}/records/{partition}/{offset}": ("", "as=schema", "as=text"),
    "/topics/{topic}/stream": ("from=earliest",),
    "/consumers/{group}/instances/{instance}/records": ("timeout=20",),
    "/v3/clusters/{cluster_id}/topics": ("", "include_authorized_operations=true"),
    "/schemas": ("", "deleted=true"),
    "/config/{subject:path}": ("defaultToGlobal=true",),
    "/mode/{subject:path}": ("defaultToGlobal=true",),
}
"""Queries of routes that need one, by the pattern of the path."""
STREAMS = {"/ui/topics/{topic}/tail/events": 1, "/topics/{topic}/stream": 2}
"""Number of pieces to read from each endless response."""

_RECORD = b'{"records":[{"value":"eA=="}]}'
_SAME_SCHEMA, _BAD_SCHEMA = (
    json.dumps({"schema": text}).encode() for text in (SCHEMA_TEXT, SCHEMA_TEXT.replace("hidden_field", "other"))
)
_V3 = "/v3/clusters/{cluster_id}"
_INSTANCE = "/consumers/{group}/instances/{instance}"
_NOWHERE: dict[str, tuple[str, ...]] = {"topic": ("nowhere",), "topic_name": ("nowhere",), "subject": ("nowhere",)}

BODIES: dict[tuple[str, str], list[tuple[bytes, bytes]]] = {
    # In this order an instance is made, subscribes, and is deleted last.
    ("POST", "/consumers/{group}"): [
        (_V2, b'{"name":"i","format":"binary","auto.offset.reset":"earliest"}'),
        (_V2, b'{"name":"a","format":"avro","auto.offset.reset":"earliest"}'),
    ],
    ("POST", f"{_INSTANCE}/subscription"): [(_V2, b'{"topic_pattern":".*"}'), (_V2, b'{"topics":["open"]}')],
    ("POST", f"{_INSTANCE}/assignments"): [(_V2, b'{"partitions":[{"topic":"hidden-topic","partition":0}]}')],
    ("GET", f"{_INSTANCE}/offsets"): [
        (_V2, b'{"partitions":[{"topic":"%s","partition":0}]}' % topic) for topic in (b"open", b"hidden-topic")
    ],
    ("POST", f"{_INSTANCE}/offsets"): [(_V2, b'{"offsets":[{"topic":"hidden-topic","partition":0,"offset":0}]}')],
    ("POST", f"{_INSTANCE}/positions"): [(_V2, b'{"offsets":[{"topic":"hidden-topic","partition":0,"offset":0}]}')],
    ("POST", f"{_INSTANCE}/positions/beginning"): [(_V2, b'{"partitions":[]}')],
    ("POST", f"{_INSTANCE}/positions/end"): [(_V2, b'{"partitions":[{"topic":"hidden-topic","partition":0}]}')],
    ("POST", "/topics/{topic}"): [
        (_BINARY, _RECORD),
        (_AVRO, b'{"value_schema_id":1,"records":[{"value":{}}]}'),
        (_AVRO, b'{"value_schema":"{\\"type\\":\\"int\\"}","records":[{"value":"x"}]}'),
    ],
    ("POST", "/topics/{topic}/partitions/{partition}"): [(_BINARY, _RECORD)],
    ("POST", "/topics/{topic}/records"): [(b"text/plain", b"x\n")],
    ("POST", f"{_V3}/topics/{{topic_name}}/records"): [
        (_JSON, b'{"value":{"type":"BINARY","data":"eA=="}}'),
        (_JSON, b'{"value":{"type":"AVRO","data":{}}}'),
        (_JSON, b'{"value":{"schema_id":1,"data":{}}}'),
        (_JSON, b'{"value":{"type":"AVRO","schema":"{\\"type\\":\\"int\\"}","data":"x"}}'),
    ],
    ("POST", f"{_V3}/topics/{{topic_name}}/records:batch"): [
        (_JSON, b'{"entries":[{"id":"1","value":{"schema_id":1,"data":{}}}]}')
    ],
    # The bodies change nothing, for any user.
    ("POST", "/ui/topics/{topic}/config"): [(_FORM, b"cleanup.policy=nonsense")],
    ("POST", "/ui/topics/{topic}/delete"): [(_FORM, b"name=another")],
    ("POST", "/ui/groups/reset"): [(_FORM, b"nothing=1")],
    ("POST", "/ui/transactions/abort"): [(_FORM, b"name=another")],
    ("POST", f"{_V3}/topics"): [(_JSON, b'{"topic_name":"open"}')],
    ("PATCH", f"{_V3}/topics/{{topic_name}}"): [(_JSON, b'{"partitions_count":1}')],
    ("DELETE", f"{_V3}/topics/{{topic_name}}"): [(_JSON, b"")],
    ("POST", f"{_V3}/topics/{{topic_name}}/configs:alter"): [
        (_JSON, b'{"validate_only":true,"data":[{"name":"cleanup.policy","value":"nonsense"}]}')
    ],
    ("PUT", f"{_V3}/topics/{{topic_name}}/configs/{{name}}"): [(_JSON, b'{"value":"nonsense"}')],
    ("DELETE", f"{_V3}/topics/{{topic_name}}/configs/{{name}}"): [(_JSON, b"")],
    ("POST", f"{_V3}/acls"): [(_JSON, b"{}")],
    ("POST", f"{_V3}/acls:batch"): [(_JSON, b'{"data":[]}')],
    ("DELETE", f"{_V3}/acls"): [(_JSON, b"")],
    ("POST", "/subjects/{subject:path}/versions"): [(_JSON, _BAD_SCHEMA)],
    ("POST", "/subjects/{subject:path}"): [(_JSON, _SAME_SCHEMA)],
    ("POST", "/compatibility/subjects/{subject:path}/versions/{version}"): [(_JSON, _BAD_SCHEMA)],
    ("POST", "/compatibility/subjects/{subject:path}/versions"): [(_JSON, _BAD_SCHEMA)],
    ("DELETE", "/subjects/{subject:path}/versions/{version}"): [(_JSON, b"")],
    ("DELETE", "/subjects/{subject:path}"): [(_JSON, b"")],
    **{(method, f"/{description}{below}"): [(_JSON, b'{"compatibility":"nonsense","mode":"nonsense"}')]
       for description in ("config", "mode") for below in ("", "/{subject:path}") for method in ("PUT", "DELETE")},
    ("DELETE", f"{_INSTANCE}/subscription"): [(_V2, b"")],
    ("DELETE", _INSTANCE): [(_V2, b"")],
}  # fmt: skip
"""Bodies that are sent to each route that takes one, in this order."""
QUICK = (
    "nobody", "super", "topic-describe", "topic-all", "topic-write", "topic-alter-configs", "group-read",
    "name-describe", "cluster-alter", "open-things", "open-all-and-cluster",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fill a store once. No test user can change what others see."""
    made = tmp_path_factory.mktemp("rights")
    fill(made)
    return made


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """Open the store."""
    made = World(folder)
    yield made
    made.close()


def make(world: World) -> tuple[Any, list[tuple[str, str]]]:
    """Return the application with its middleware, and (method, path) of all routes."""
    app: Any = make_app(Console(HttpContext(world.store, HttpSettings(allow_writes=True), world.authorizer)))

    def walk(routes: list[Any], before: str = "") -> Iterator[tuple[str, str]]:
        for route in routes:
            if isinstance(route, Mount):
                yield from walk(route.routes, before + route.path)
            else:
                for method in sorted(set(route.methods or route.app._by_method) - {"HEAD"}):
                    yield method, before + route.path

    return app, list(walk(app._app.routes))


def test_every_route_is_asked(world: World) -> None:
    """Each route with a body has a request in this test's table, and each row of the table has a route."""
    routes = make(world)[1]
    assert {route for route in routes if route[0] != "GET"} == {route for route in BODIES if route[0] != "GET"}
    assert len(routes) == len(set(routes)) > 100
    assert {*QUERIES, *STREAMS} <= {path for _, path in routes}


class Visitor:
    """One user's requests to the application, without a port."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.user = USERS[name]
        self.app, self.routes = make(world)
        self.seen: set[str] = set()
        self.leaks: list[str] = []
        self.statuses: dict[tuple[str, str], set[int]] = {}

    async def visit(self) -> None:
        """Send a request to every route."""
        mutating = [route for route in BODIES if route[0] != "GET"]
        begins = [route for route in mutating if route[1].startswith("/consumers") and route[0] == "POST"]
        ends = [route for route in mutating if route[0] == "DELETE"]
        middle = [route for route in mutating if route not in begins and route not in ends]
        reads = [route for route in self.routes if route[0] == "GET"]
        for method, path in (*begins, *reads, *middle, *ends):
            for target in self.targets(method, path):
                for content_type, body in BODIES.get((method, path), [(b"", b"")]):
                    await self.ask(method, path, target, content_type, body)

    def targets(self, method: str, path: str) -> list[str]:
        """Return addresses of a route for visible, hidden and internal topics."""
        world = self.world
        values: dict[str, tuple[Any, ...]] = {
            "topic": _TOPICS, "topic_name": _TOPICS, "group": ("rest-group",), "consumer_group_id": _GROUPS,
            "consumer_id": (world.member_id,), "instance": ("i", "a"), "subject": ("open-value", "hidden-subject"),
            "partition": (0,), "partition_id": (0,), "offset": (0, 1), "version": ("latest",), "id": (world.schema_id,),
            "cluster_id": (cluster_id_of(world.store.store_id),), "broker_id": (1,), "rest": ("nowhere",),
            "name": ("retention.ms",) if path.startswith("/v3") else ("console.css",),
        }  # fmt: skip
        if method == "DELETE":
            values |= _NOWHERE
        names = [name.partition(":")[0] for name in re.findall(r"\{([^}]*)\}", path)]
        found = []
        for chosen in itertools.product(*(values[name] for name in names)):
            target = path
            for value in chosen:
                target = re.sub(r"\{[^}]*\}", quote(str(value), safe=""), target, count=1)
            queries = QUERIES.get(path, ("",))
            if path == f"{_V3}/acls" and method == "DELETE":
                queries = (
                    "resource_type=TOPIC&resource_name=nowhere&pattern_type=LITERAL&operation=READ&permission=DENY",
                )
            found += [f"{target}?{query}" if query else target for query in queries]
        return found

    async def ask(self, method: str, path: str, target: str, content_type: bytes, body: bytes) -> None:
        """Send one request. A hidden name in the response that the request did not contain is a leak."""
        status, answer = await self.request(method, target, content_type, body, STREAMS.get(path, 0))
        assert status < 500, (self.name, method, target, answer[:300])
        self.statuses.setdefault((method, path), set()).add(status)
        found = shown(answer)
        self.seen |= found & self.user.sees
        said = f"{target} {body.decode()}".encode()
        for kind in found - self.user.sees:
            if marks := [mark for mark in SECRETS[kind] if mark in answer and mark not in said]:
                at = answer.index(marks[0])
                self.leaks.append(f"{method} {target} {status}: {kind} in {answer[max(at - 60, 0) : at + 60]!r}")

    async def request(
        self, method: str, target: str, content_type: bytes, body: bytes, pieces: int
    ) -> tuple[int, bytes]:
        """Return (status, body); of an endless response return the first pieces."""
        path, _, query = target.partition("?")
        headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
        if content_type:
            headers.append((b"content-type", content_type))
        if path.startswith("/consumers/"):
            headers.append((b"accept", _V2))  # valid for instances of every format
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80),
            TLS_PRINCIPAL: principal(self.name),
        }  # fmt: skip
        requests = [{"type": "http.request", "body": body, "more_body": False}]
        gone, status, found = asyncio.Event(), 0, []

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message.get("body"):
                found.append(message["body"])
                if len(found) == pieces:
                    gone.set()

        await asyncio.wait_for(self.app(scope, receive, send), _WITHIN_S)
        return status, b"".join(found)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in USERS]
)
def test_who_has_a_right_sees_that_and_nothing_else(world: World, name: str) -> None:
    """No response shows what the rules deny, and each permitted thing is shown somewhere."""
    visitor = Visitor(world, name)
    asyncio.run(visitor.visit())
    assert not visitor.leaks, "\n".join(visitor.leaks[:20])
    assert visitor.seen == visitor.user.sees
    assert any(403 in statuses for statuses in visitor.statuses.values()) == (name != "super")
    if name == "super":  # otherwise the requests are wrong, and prove nothing
        unread = {route for route, codes in visitor.statuses.items() if route[0] == "GET" and not codes & {200, 307}}
        assert unread == {("GET", "/ui/{rest:path}")}
        unsaid = {route: codes for route, codes in visitor.statuses.items() if codes & {403, 405, 406, 415}}
        assert not unsaid


def test_the_stores_own_topics_are_shown_to_who_may_change_the_rules(world: World) -> None:
    """Figures of internal topics require describing them and the cluster; their records require more."""

    visitors = {name: Visitor(world, name) for name in ("super", "topic-all")}

    async def look(name: str, path: str) -> tuple[int, set[str]]:
        status, answer = await visitors[name].request("GET", path, b"", b"", 0)
        return status, shown(answer)

    async def looks() -> None:
        for topic, kind in (("__consumer_offsets", GROUP), ("__transaction_state", NAME)):
            for below in ("", "/records?at=start", "/partitions/0", "/records/0/0", "/tail", "/config", "/delete"):
                assert (await look("topic-all", f"/ui/topics/{topic}{below}"))[0] == 403
            assert await look("super", f"/ui/topics/{topic}") == (200, set())
            status, found = await look("super", f"/ui/topics/{topic}/records?at=start")
            assert status == 200
            assert kind in found

    asyncio.run(looks())


def test_who_may_not_see_the_configuration(world: World) -> None:
    """No list and no page shows it, even if the user may see the topic."""

    visitors = {name: Visitor(world, name) for name in ("super", "topic-describe")}

    async def shows(name: str, path: str) -> set[str]:
        status, answer = await visitors[name].request("GET", path, b"", b"", 0)
        assert status == 200
        return shown(answer) & {TOPIC, CONFIG, VALUE}

    async def looks() -> None:
        for path in ("/ui/", "/ui/topics/open", "/ui/topics/open/partitions/0", "/topics/open"):
            assert CONFIG in await shows("super", path), path
            assert CONFIG not in await shows("topic-describe", path), path

    asyncio.run(looks())
