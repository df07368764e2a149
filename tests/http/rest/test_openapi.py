"""The OpenAPI document is valid, and responses match it."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from doors import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from segmentlog.http.rest.rest_routes import ENDPOINTS, openapi
from segmentlog.store import LogStore

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_it_describes_every_route(client: Client) -> None:
    """The document has every endpoint, and all its parameters and references are defined."""
    document = client.get("/openapi.json").json()
    assert document == openapi()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (value for key, value in node.items() if key == "$ref")
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from references(inner)

    for reference in set(references(document)):
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def _paths(store: LogStore) -> dict[str, list[Any]]:
    """Return path parameters that exist, so that operations return more than 404."""
    import base64

    cluster = base64.urlsafe_b64encode(bytes.fromhex(store.store_id)).decode().rstrip("=")
    return {
        "cluster_id": [cluster], "topic": ["t", "u", "nope"], "topic_name": ["t", "u", "nope"], "partition": [0, 1, 9],
        "partition_id": [0, 1, 9], "broker_id": [1, 2], "group": ["g", "h"], "consumer_group_id": ["g", "nope"],
        "instance": ["i"], "consumer_id": ["x"], "name": ["retention.ms", "cleanup.policy", "nope"],
    }  # fmt: skip


def _ask(
    client: Client, operation: Any, known: dict[str, list[Any]], turns: Iterator[int], asked: set[tuple[str, int]]
) -> None:
    """Request one operation in many ways, and check each response."""
    body = {"content-type": "application/vnd.kafka.v2+json"}

    @given(case=operation.as_strategy(), picks=st.lists(st.integers(0, 5), min_size=5, max_size=5))
    @settings(max_examples=12, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any, picks: list[int]) -> None:
        for number, name in enumerate(case.path_parameters or {}):
            if name in known and picks[number % 5]:
                case.path_parameters[name] = known[name][picks[number % 5] % len(known[name])]
        if "/instances/" in operation.path and not next(turns) % 3:
            client.post("/consumers/g", json={"name": "i", "format": "json"}, headers=body)
        if "/records" in operation.path and case.query:
            case.query.pop("timeout", None)
        arguments = case.as_transport_kwargs(base_url="http://localhost")
        wanted = {
            key: arguments[key] for key in ("params", "headers", "json", "files") if arguments.get(key) is not None
        }
        answer = client.request(arguments["method"], arguments["url"], content=arguments.get("data"), **wanted)
        asked.add((operation.label, answer.status_code))
        case.validate_response(schemathesis.Response.from_httpx(answer, verify=False), checks=_CHECKS)

    ask()


@pytest.mark.long
def test_answers_are_as_it_says(store: LogStore, client: Client, tmp_path: Path) -> None:
    """Generated requests get only responses that the document describes, and no internal error."""
    store.create_topic("t", partitions=2).partition(0).append([b'{"a":1}', b"\xff", None], keys=[b"k", None, b"z"])
    store.create_topic("u")
    store.groups.reset("g", {("t", 0): 1})  # type: ignore[dict-item]
    known = _paths(store)
    schema = schemathesis.openapi.from_dict(openapi())
    turns = itertools.count()
    asked: set[tuple[str, int]] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.path.endswith("/stream"):  # it does not end; tests of its own ask for it
            _ask(client, operation, known, turns, asked)
    client.context.is_closing = True  # ends the consumers that the requests made
    ends_s = time.monotonic() + 10
    while any(store.groups.describe(name).members for name in store.groups.names()) and time.monotonic() < ends_s:
        time.sleep(0.05)
    time.sleep(1)
    succeeded = {label for label, status in asked if status < 300}
    assert len(succeeded) > 25, sorted({label for label, _ in asked} - succeeded)


def test_a_read_only_door_describes_itself_as_well(store: LogStore, read_only_client: Client) -> None:
    """Responses of a read-only server match the document, too."""
    document = openapi()
    answer = read_only_client.delete(f"/v3/clusters/{_paths(store)['cluster_id'][0]}/topics/t")
    assert answer.status_code == 403
    assert "403" in document["paths"]["/v3/clusters/{cluster_id}/topics/{topic_name}"]["delete"]["responses"]
    jsonschema.validate(answer.json(), document["components"]["schemas"]["Problem"])
