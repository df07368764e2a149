"""URLs of coordination engines: their forms, their mistakes, and their secrets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from segmentlog.coordination.bucket_engine import BucketEngine
from segmentlog.coordination.engine_url import USER_VARIABLE, parse_address
from segmentlog.coordination.etcd_engine import EtcdEngine
from segmentlog.coordination.open_engine import open_engine
from segmentlog.errors import InvalidConfig


@pytest.mark.parametrize(
    ("url", "hosts", "path"),
    [
        ("etcd://h1,h2,h3/orders", (("h1", 2379), ("h2", 2379), ("h3", 2379)), "/orders"),
        ("zk://h1,h2:99/a/b.c-d_e/", (("h1", 2181), ("h2", 99)), "/a/b.c-d_e"),
        ("ETCD://[::1],[fe80::1%25]:1/x", (("::1", 2379), ("fe80::1%25", 1)), "/x"),
        ("zks://h/x", (("h", 2281),), "/x"),
        ("etcd://h/..x", (("h", 2379),), "/..x"),
    ],
)
def test_hosts_and_path(url: str, hosts: tuple[tuple[str, int], ...], path: str) -> None:
    """Each host has a port of its own, or the usual one."""
    address = parse_address(url, {})
    assert (address.hosts, address.path, address.user, address.password) == (hosts, path, "", "")
    assert address.is_tls == url.startswith("zks")


def test_user_and_password() -> None:
    """They come from the URL, or else from the environment; ``repr`` and the URL for messages do not have them."""
    environment = {USER_VARIABLE: "admin:pa:ss@word"}
    address = parse_address("etcd://us%40er:s%2Fe%3Ac@h/x", environment)
    assert (address.user, address.password) == ("us@er", "s/e:c")
    assert address.url == "etcd://h/x"
    assert "s/e" not in repr(address)
    assert "us@er" not in repr(address)
    address = parse_address("zk://h/x", environment)
    assert (address.user, address.password) == ("admin", "pa:ss@word")


@pytest.mark.parametrize(
    "url",
    [
        "etcd://h", "etcd://h/", "etcd:///x", "etcd://h,/x", "etcd://h:0/x", "etcd://h:65536/x", "etcd://h:x/x",
        "etcd://h//x", "etcd://h/./x", "etcd://h/../x", "etcd://h/x y", "etcd://h/x#y", "etcd://h/%41", "etcd://::1/x",
        "zk://h/é", "etcd://secret@h/x", "etcd://secret:@h/x", "etcd://:secret@h/x", "etcd://user:sec/ret@h/x", "etcd://user:sec?ret@h/x",
        "etcd://user:secret@h", "etcd://h/x?cacert=secret", "etcds://h/x?secret", "etcds://h/x?password=secret",
        "etcds://h/x?cert=a", "zks://h/x?key=a", "etcds://h/x?cacert=/nowhere", "etcds://h/x?cacert=%00",
    ],
)  # fmt: skip
def test_mistakes_in_urls(url: str) -> None:
    """The error lists the accepted forms. It repeats no password and no query."""
    with pytest.raises(InvalidConfig, match=r"^(url|cacert) = .*(/path|FILE|USER:PASSWORD|PEM file)") as caught:
        open_engine(url)
    assert "sec" not in str(caught.value).replace("after", "")


def test_files_of_certificates_are_checked(tmp_path: Path) -> None:
    """Opening the engine raises an error for an unreadable file, or one without a certificate."""
    (tmp_path / "no.pem").write_text("no certificate")
    for query in (f"cacert={tmp_path}/no.pem", f"cert={tmp_path}/no.pem&key={tmp_path}/no.pem", f"cacert={tmp_path}"):
        with pytest.raises(InvalidConfig, match="PEM file"):
            open_engine(f"etcds://h/x?{query}")


def test_the_scheme_chooses_the_engine(tmp_path: Path) -> None:
    """An unknown scheme is an error that lists all of them."""
    assert isinstance(open_engine(f"file://{tmp_path}/b"), BucketEngine)
    assert isinstance(open_engine("etcds://h/x"), EtcdEngine)
    for url in ("consul://u:secret@h/x", "orders", str(tmp_path)):
        with pytest.raises(InvalidConfig, match=r"etcd://HOST,HOST,HOST/path, zk://.*, s3://bucket/path") as caught:
            open_engine(url)
        assert "secret" not in str(caught.value)


def test_zookeeper_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kazoo the error says how to install it. Nothing else imports it."""
    monkeypatch.setitem(sys.modules, "kazoo", None)
    with pytest.raises(InvalidConfig, match=r"zk://h/x.*pip install '.\[zookeeper\]'") as caught:
        open_engine("zk://u:secret@h/x")
    assert "secret" not in str(caught.value)
    open_engine("etcd://h/x")
