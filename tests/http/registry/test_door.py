"""The schema registry over HTTP: error codes, access rights and limits."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from doors import Client

from segmentlog import schemas
from segmentlog.errors import InvalidConfig
from segmentlog.http.serving import HttpServer
from segmentlog.schemas import registry_errors
from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.store import LogStore

INT = {"schema": '"int"'}


def answer(response: httpx.Response) -> tuple[int, Any]:
    """Return the status and the error code."""
    return response.status_code, response.json().get("error_code")


WRONG: list[tuple[str, str, Any, tuple[int, int]]] = [
    ("GET", "/subjects/s/versions", None, (404, 40401)),
    ("GET", "/subjects/t/versions/9", None, (404, 40402)),
    ("GET", "/subjects/t/versions/x", None, (422, 42202)),
    ("GET", "/schemas/ids/9", None, (404, 40403)),
    ("GET", "/schemas/ids/x", None, (404, 40403)),
    ("GET", "/schemas/ids/99999999999999999999", None, (404, 40403)),
    ("POST", "/subjects/t", {"schema": '"long"'}, (404, 40403)),
    ("POST", "/subjects/t/versions", {"schema": '"bytes"'}, (409, 40901)),
    ("POST", "/subjects/t/versions", {"schema": "{"}, (422, 42201)),
    ("POST", "/subjects/t/versions", {}, (422, 42201)),
    ("POST", "/subjects/t/versions", {"schema": 5}, (400, 400)),
    ("POST", "/subjects/t/versions", {**INT, "id": 7}, (422, 42205)),
    ("POST", "/subjects/t/versions", {**INT, "schemaType": "XML"}, (422, 42201)),
    ("POST", "/subjects/t/versions", {**INT, "references": [{"name": "a", "subject": "b", "version": 1}]},
     (422, 42201)),
    ("DELETE", "/subjects/t?permanent=true", None, (404, 40405)),
    ("DELETE", "/subjects/t/versions/1?permanent=true", None, (404, 40407)),
    ("GET", "/config/t", None, (404, 40408)),
    ("PUT", "/config/t", {"compatibility": "SIDEWAYS"}, (422, 42203)),
    ("PUT", "/config/t", {"nothing": 1}, (422, 42201)),
    ("PUT", "/config", [], (400, 400)),
    ("GET", "/mode/t", None, (404, 40409)),
    ("PUT", "/mode/t", {"mode": "SIDEWAYS"}, (422, 42204)),
    ("PUT", "/mode/t", {}, (422, 42204)),
    ("PUT", "/mode/t", {"mode": "IMPORT"}, (422, 42205)),
    ("GET", "/subjects?offset=x", None, (400, 400)),
    ("GET", "/config/%00", None, (422, 42208)),
    ("POST", "/compatibility/subjects/t/versions/9", INT, (404, 40402)),
    ("PATCH", "/subjects", None, (405, 405)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_has_confluents_codes(client: Client, store: LogStore, number: int) -> None:
    """Each error has Confluent's status and code."""
    store.schemas.register("t", schemas.Draft('"int"'))
    method, path, body, wanted = WRONG[number]
    assert answer(client.request(method, path, json=body)) == wanted


def test_a_subject_may_have_any_name(client: Client) -> None:
    """Subjects may contain slashes, spaces and other characters that a path escapes."""
    for name in ("a/b c", "ä:?#", "versions", "x/versions"):
        quoted = "".join(f"%{byte:02X}" for byte in name.encode())
        assert client.post(f"/subjects/{quoted}/versions", json=INT).status_code == 200
        assert client.get(f"/subjects/{quoted}/versions/latest").json()["subject"] == name
        assert client.delete(f"/subjects/{quoted}").json() == [1]


def test_answers_are_confluents(client: Client) -> None:
    """Responses have Confluent's shape, and omit fields with default values."""
    assert client.post("/subjects/s/versions", json=INT).json() == {"id": 1, "version": 1}
    made = client.get("/subjects/s/versions/1")
    assert made.json() == {"subject": "s", "version": 1, "id": 1, "schema": '"int"'}
    assert made.headers["content-type"] == "application/vnd.schemaregistry.v1+json"
    assert client.get("/schemas/ids/1?fetchMaxId=true").json() == {"schema": '"int"', "maxId": 1}
    assert client.get("/schemas/ids/1/schema").text == client.get("/subjects/s/versions/latest/schema").text == '"int"'
    assert client.get("/schemas/ids/1/subjects").json() == ["s"]
    assert client.get("/schemas/ids/1/versions").json() == [{"subject": "s", "version": 1}]
    assert client.get("/subjects/s/versions/1/referencedby").json() == []
    assert client.get("/contexts").json() == ["."]
    assert client.put("/config", json={"compatibility": "full"}).json() == {"compatibility": "full"}
    assert client.get("/config").json() == {"compatibilityLevel": "FULL"}
    assert client.get("/config/s?defaultToGlobal=true").json() == {"compatibilityLevel": "FULL"}
    assert client.delete("/config").json() == {"compatibilityLevel": "FULL"}
    assert client.put("/mode/s", json={"mode": "READONLY"}).json() == {"mode": "READONLY"}
    assert client.delete("/mode/s").json() == {"mode": "READONLY"}
    verdict = client.post("/compatibility/subjects/s/versions?verbose=true", json={"schema": '"bytes"'}).json()
    assert verdict["is_compatible"] is False
    assert verdict["messages"]
    broken = client.post("/compatibility/subjects/s/versions/latest?verbose=true", json={"schema": "{"})
    assert broken.json()["is_compatible"] is False
    for number in range(3):
        client.post(f"/subjects/p{number}/versions", json=INT)
    assert client.get("/subjects?subjectPrefix=p&offset=1&limit=1").json() == ["p1"]
    assert [one["subject"] for one in client.get("/schemas?latestOnly=true").json()] == ["p0", "p1", "p2", "s"]
    assert client.delete("/subjects/p0").json() == [1]
    assert client.get("/subjects?deletedOnly=true").json() == ["p0"]
    assert client.post("/subjects/p0?deleted=true", json=INT).json()["deleted"] is True


def test_without_writes_schemas_are_registered_and_nothing_is_deleted(read_only_client: Client) -> None:
    """A read-only server registers schemas, but refuses settings and deletions."""
    assert read_only_client.post("/subjects/s/versions", json=INT).status_code == 200
    for method, path in (("DELETE", "/subjects/s"), ("PUT", "/config"), ("PUT", "/mode"), ("DELETE", "/config")):
        assert answer(read_only_client.request(method, path, json={"mode": "READONLY"}))[0] == 403
    assert read_only_client.get("/subjects").json() == ["s"]


def test_rules_of_the_topic_say_who_may_do_what(
    serve: Callable[..., HttpServer], tmp_path: Path, store: LogStore
) -> None:
    """Reading requires READ and registering WRITE; a password in a URL is used and never shown."""
    users, acls = tmp_path / "users.json", tmp_path / "acls"
    for name in ("reader", "writer"):
        add_user(str(users), name, "secret-1234")
    acls.write_text("allow User:reader read topic:_schemas\nallow User:writer read,write topic:_schemas\n")
    server = serve(security=Security(users=str(users), acls=str(acls)))
    reader, writer = (
        schemas.RemoteRegistry(server.url.replace("://", f"://{name}:secret-1234@")) for name in ("reader", "writer")
    )
    assert "secret" not in repr(reader)
    with pytest.raises(registry_errors.RemoteError, match="may not write topic '_schemas'") as told:
        reader.register("s", schemas.Draft('"int"'))
    assert "secret" not in str(told.value)
    assert writer.register("s", schemas.Draft('"int"')).id == 1
    assert reader.by_id(1).schema == '"int"'
    with pytest.raises(registry_errors.RemoteError, match="name and a password"):
        schemas.RemoteRegistry(server.url).by_id(1)


class _NoRegistry(BaseHTTPRequestHandler):
    """An HTTP server that is not a registry."""

    def do_GET(self) -> None:
        elsewhere = self.path.endswith("/2")
        self.send_response(302 if elsewhere else 200)
        if elsewhere:
            self.send_header("Location", "/schemas/ids/1")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def test_a_registry_that_does_not_answer_is_told(http_server: HttpServer) -> None:
    """A closed port, another server, a redirect and an invalid URL raise a clear error."""
    with pytest.raises(registry_errors.RegistryUnavailable):
        schemas.RemoteRegistry("http://127.0.0.1:1").by_id(1)
    with pytest.raises(InvalidConfig):
        schemas.RemoteRegistry("ftp://x")
    with pytest.raises(registry_errors.UnknownSchema):
        schemas.RemoteRegistry(http_server.url).by_id(5)
    with HTTPServer(("127.0.0.1", 0), _NoRegistry) as other:
        thread = threading.Thread(target=lambda: [other.handle_request() for _ in range(2)])
        thread.start()
        registry = schemas.RemoteRegistry(f"http://127.0.0.1:{other.server_port}")
        with pytest.raises(registry_errors.RegistryUnavailable, match="does not come from a schema registry"):
            registry.by_id(1)
        with pytest.raises(registry_errors.RemoteError, match="302"):
            registry.by_id(2)
        thread.join()


def test_damage_is_told_with_the_code_of_the_store(client: Client, store: LogStore) -> None:
    """If the registry cannot read its topic, the error has code 50001 and the server keeps running."""
    store.schemas.register("s", schemas.Draft('"int"'))
    store.close()
    status, code = answer(client.get("/subjects"))
    assert (status, code) == (503, 50001)
    assert json.loads(client.get("/subjects").text)["message"]


def test_bodies_are_as_large_as_schemas_may_be(client: Client, read_only_client: Client) -> None:
    """Larger bodies are refused without being read; refused requests are not read either."""
    large = b'{"schema": "' + b"x" * (9 << 20) + b'"}'
    assert client.post("/subjects/s/versions", content=large).status_code == 413
    assert read_only_client.put("/config", content=large).status_code == 403
    assert client.request("GET", "/subjects", content=large).status_code == 200
