"""librdkafka, as confluent-kafka has it, at the door: who gets in, as whom, and what it sees then."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import trustme
from security.certificates import write_pair

import segmentlog
from segmentlog.security.mechanisms import MECHANISMS
from segmentlog.security.users import add_user
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker import Security
from segmentlog.store import LogStore

admin = pytest.importorskip("confluent_kafka.admin")

WAIT_S = 20.0
PASSWORD = "pässwörd, = ß"
EVERY_RULE = (
    admin.ResourceType.ANY, None, admin.ResourcePatternType.ANY, None, None, admin.AclOperation.ANY,
    admin.AclPermissionType.ANY,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with one topic for ann, and one that no user may see."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("mine")
        store.create_topic("secret")
        yield store


@pytest.fixture
def security(tmp_path: Path) -> dict[str, str]:
    """Write the files of three users and of their rules."""
    for name, password in (("ann", PASSWORD), ("bob", "other"), ("root", "r")):
        add_user(str(tmp_path / "users"), name, password, iterations=4096)
    (tmp_path / "acls").write_text("# ours\nsuper User:root\nallow User:ann describe topic:mine\n")
    return {"users": str(tmp_path / "users"), "acls": str(tmp_path / "acls")}


def served(store: LogStore, **security: Any) -> Server:
    """Return a server of this store."""
    return Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(**security),
        owns_store=False,
    )  # fmt: skip


def client(server: Server, name: str, password: str, mechanism: str = "SCRAM-SHA-256", **more: Any) -> Any:
    """Return a client that authenticates."""
    return admin.AdminClient({
        "bootstrap.servers": server.bootstrap_servers, "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism, "sasl.username": name, "sasl.password": password, **more,
    })  # fmt: skip


def seen(one: Any) -> list[str]:
    """Return the topics that a client can see."""
    return sorted(one.list_topics(timeout=WAIT_S).topics)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_who_logs_in_sees_his_topics(store: LogStore, security: dict[str, str], mechanism: str) -> None:
    """Rules decide what each user sees, and other topics stay hidden."""
    with served(store, **security) as server:
        assert seen(client(server, "ann", PASSWORD, mechanism)) == ["mine"]
        assert seen(client(server, "bob", "other", mechanism)) == []
        assert seen(client(server, "root", "r", mechanism)) == ["mine", "secret"]


@pytest.mark.long
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kcat_logs_in(store: LogStore, security: dict[str, str], mechanism: str) -> None:
    """kcat with the librdkafka that it was built with: before 2.6.1 that sends its SCRAM nonce twice."""
    kcat = needs.program("kcat")
    with served(store, **security) as server:
        for password, is_right in ((PASSWORD, True), ("wrong", False)):
            settings = {
                "security.protocol": "sasl_plaintext", "sasl.mechanism": mechanism, "sasl.username": "ann",
                "sasl.password": password,
            }  # fmt: skip
            options = [word for key, value in settings.items() for word in ("-X", f"{key}={value}")]
            done = subprocess.run(
                [kcat, "-L", "-m", "5", "-b", server.bootstrap_servers, *options],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False,
            )  # fmt: skip
            assert ('topic "mine"' in done.stdout) == is_right, (done.stdout, done.stderr)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_client_hears_that_it_failed(store: LogStore, security: dict[str, str], mechanism: str) -> None:
    """An error of authentication, the same whether or not there is such a user; not a connection that just ends."""
    told: dict[str, str] = {}
    with served(store, **security) as server:
        for name in ("ann", "nobody"):
            heard: list[Any] = []
            one = client(server, name, "wrong", mechanism, error_cb=heard.append)
            ends = time.monotonic() + WAIT_S
            while not heard and time.monotonic() < ends:
                one.poll(0.1)
            assert heard[0].name() == "_AUTHENTICATION", heard[0].str()
            told[name] = heard[0].str().partition("SASL authentication error: ")[2].partition(" (after")[0]
    assert told["ann"] == told["nobody"]
    assert "invalid" in told["ann"].lower()


def test_a_certificate_is_a_name(store: LogStore, security: dict[str, str], tmp_path: Path) -> None:
    """A client with TLS alone has the name in its certificate; without a certificate it is rejected."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = write_pair(tmp_path, "server", authority.issue_cert("127.0.0.1", "localhost"))
    ann = write_pair(
        tmp_path, "ann",
        authority.issue_cert("a@b", common_name="Ann Lee", organization_name="Acme, Inc.", organization_unit_name="X"),
    )  # fmt: skip
    with open(security["acls"], "a") as file:
        file.write(r'allow "User:CN=Ann Lee,OU=X,O=Acme\\, Inc." read topic:mine' + "\n")
    files = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": str(tmp_path / "ca.pem")}
    with served(store, acls=security["acls"], **files) as server:
        options = {
            "bootstrap.servers": server.bootstrap_servers, "security.protocol": "SSL",
            "ssl.ca.location": str(tmp_path / "ca.pem"),
        }  # fmt: skip
        named = {"ssl.certificate.location": ann.certificate, "ssl.key.location": ann.key}
        assert seen(admin.AdminClient({**options, **named})) == ["mine"]
        heard: list[Any] = []
        stranger = admin.AdminClient({**options, "error_cb": heard.append})
        ends = time.monotonic() + WAIT_S
        while not heard and time.monotonic() < ends:
            stranger.poll(0.1)
        assert heard


def test_rules_are_made_and_deleted_by_a_client(store: LogStore, security: dict[str, str]) -> None:
    """kafka-acls.sh sends these requests; the rules count at once, and the file keeps the user's lines."""
    before = Path(security["acls"]).read_text()
    with served(store, **security) as server:
        root = client(server, "root", "r")
        bob = client(server, "bob", "other")
        rule = admin.AclBinding(
            admin.ResourceType.TOPIC, "sec", admin.ResourcePatternType.PREFIXED, "User:bob", "*",
            admin.AclOperation.DESCRIBE, admin.AclPermissionType.ALLOW,
        )  # fmt: skip
        for future in root.create_acls([rule]).values():
            future.result(WAIT_S)
        assert Path(security["acls"]).read_text() == before + "allow User:bob describe topic:sec*\n"
        assert seen(bob) == ["secret"]
        assert rule in root.describe_acls(admin.AclBindingFilter(*EVERY_RULE)).result(WAIT_S)
        # librdkafka has no ear for the error in this answer.
        assert bob.describe_acls(admin.AclBindingFilter(*EVERY_RULE)).result(WAIT_S) == []
        about_bob = admin.AclBindingFilter(*EVERY_RULE[:3], "User:bob", *EVERY_RULE[4:])
        (deleted,) = root.delete_acls([about_bob]).values()
        assert deleted.result(WAIT_S) == [rule]
        assert seen(bob) == []
    assert Path(security["acls"]).read_text() == before
