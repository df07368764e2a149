"""Failures of an object store become errors that say what failed, where, and whether to retry, without secrets."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from objects.buckets import SERVERS, cloud, disconnected, served
from objects.failing_s3 import (
    FailingS3,
    Fault,
    answered,
    cut,
    lost,
    refused,
    refused_though_done,
    repeating,
    silent,
)
from objects.s3_servers import BUCKET, KEY_ID, OTHER_KEY_ID, REGION, SECRET, S3Server
from waiting import wait_until

import segmentlog
from segmentlog.errors import ConditionIgnored, InvalidConfig, ObjectStoreError
from segmentlog.log.partition import Partition
from segmentlog.objects.bucket.base import ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.cloud_bucket import CloudBucket
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore
from segmentlog.testing.ports import free_ports

TOKEN = "planted//session+token=="
PLANTED = (
    KEY_ID,
    OTHER_KEY_ID,
    SECRET,
    TOKEN,
    "planted%2F%2Fsession",
    "plantedpassword",
    "plantedsignature",
    "planted%2Fsecret",
)
TRIES = 3
QUICK = {
    "max_retries": TRIES - 1,
    "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5)},
}

Call = Callable[[CloudBucket], object]
CALLS: dict[str, Call] = {
    "get": lambda bucket: bucket.get("a/key"),
    "get_range": lambda bucket: bucket.get_range("a/key", 0, 1),
    "put": lambda bucket: bucket.put("a/key", b"new"),
    "swap, create": lambda bucket: bucket.compare_and_swap("a/key", b"new", None),
    "swap, update": lambda bucket: bucket.compare_and_swap("a/key", b"new", '{"e_tag": "\\"x\\""}'),
    "delete": lambda bucket: bucket.delete(["a/key"]),
    "list": lambda bucket: list(bucket.list()),
}


def patience(fault: Fault) -> str:
    """Return the timeout of a client: short if no answer comes, otherwise longer than a busy machine needs."""
    return "300ms" if fault is silent else "60s"


@pytest.fixture
def failing() -> Iterator[FailingS3]:
    """Provide a server that fails on demand."""
    with disconnected():
        server = FailingS3()
        try:
            yield server
        finally:
            server.close()


@pytest.fixture
def bucket(failing: FailingS3) -> CloudBucket:
    """Provide a bucket on the failing server that sends each request up to three times."""
    return cloud(failing.server, retry_config=QUICK)


@pytest.fixture(scope="module", params=sorted(SERVERS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Provide a real server."""
    with served(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


def failure(call: Call, bucket: CloudBucket) -> ObjectStoreError:
    """Return the error that the call raises. It must not be a subclass, which would have another meaning."""
    with pytest.raises(ObjectStoreError) as caught:
        call(bucket)
    assert type(caught.value) is ObjectStoreError
    assert caught.value.url == bucket.url
    assert str(caught.value).startswith(f"{bucket.url}: {caught.value.what}: ")
    assert_no_secret(caught.value)
    return caught.value


def assert_no_secret(error: BaseException, *more: str) -> None:
    """Check that no output of the error contains a secret."""
    printed = "".join(traceback.format_exception(error))
    for text in (str(error), repr(error), repr(error.args), repr(vars(error)), printed, *more):
        for secret in PLANTED:
            assert secret not in text


# ---------------------------------------------------------------- real servers


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bucket_that_is_not_there_is_told(real: S3Server, call: Call) -> None:
    """The error is not that of a missing object or an empty store; a retry does not help."""
    bucket = CloudBucket("s3://nowhere/place", **(real.options | {"retry_config": QUICK}))
    with disconnected():
        error = failure(call, bucket)
        assert "NoSuchBucket" in error.why
        assert not error.retriable
        del bucket


@pytest.mark.long  # the set-up builds the server
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_who_may_not_is_told(tmp_path_factory: pytest.TempPathFactory, call: Call) -> None:
    """A server that verifies signatures refuses: a retry does not help, and the error does not contain the secret."""
    with served("versitygw", tmp_path_factory.mktemp("server")) as server, disconnected():
        bucket = cloud(server, secret_access_key=f"{SECRET} but wrong", retry_config=QUICK)
        error = failure(call, bucket)
        assert "SignatureDoesNotMatch" in error.why
        assert not error.retriable


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_server_that_is_gone_is_told(call: Call) -> None:
    """The error names the address, and that a later attempt may succeed."""
    port = free_ports()
    error = failure(call, cloud(S3Server(f"http://127.0.0.1:{port}"), retry_config=QUICK))
    assert f"127.0.0.1:{port}" in error.why
    assert "no server listens at this address" in error.why
    assert error.retriable


def test_no_such_host_is_told() -> None:
    """The error says in words that the host is unknown."""
    error = failure(CALLS["get"], cloud(S3Server("http://nowhere.invalid"), retry_config=QUICK))
    assert "the host name is unknown" in error.why


# ---------------------------------------------------------------- requests that fail


@pytest.mark.parametrize("status", [500, 502, 503, 429])
@pytest.mark.parametrize("name", ["get", "put", "swap, create"])
def test_a_server_that_fails_for_a_moment_is_asked_again(
    failing: FailingS3, bucket: CloudBucket, name: str, status: int
) -> None:
    """The retry succeeds silently."""
    if name == "get":
        bucket.put("a/key", b"there")
    failing.asked.clear()
    failing.faults += [refused(status, "SlowDown")] * (TRIES - 1)
    CALLS[name](bucket)
    assert len(failing.asked) >= TRIES
    assert bucket.get("a/key")[0] == (b"there" if name == "get" else b"new")


@pytest.mark.parametrize("name", ["get", "get_range", "put", "swap, create", "swap, update"])
def test_a_server_that_goes_on_failing_is_told(failing: FailingS3, bucket: CloudBucket, name: str) -> None:
    """The call fails after its retries; a later call may succeed."""
    failing.always = refused(503, "SlowDown", "Please reduce your request rate.")
    error = failure(CALLS[name], bucket)
    assert error.what == "a/key"
    assert "503" in error.why
    assert "SlowDown: Please reduce your request rate." in error.why
    assert error.retriable
    assert len(failing.asked) == TRIES


@pytest.mark.parametrize(
    ("fault", "retriable", "said"),
    [
        (refused(400, "InvalidRequest"), False, "InvalidRequest"),
        (refused(403, "AccessDenied"), False, "access denied"),
        (refused(401, "Unauthorized"), False, "access denied"),
        (refused(405, "MethodNotAllowed"), False, "MethodNotAllowed"),
        (refused(501, "NotImplemented", "A header you provided..."), False, "NotImplemented: A header you provided"),
        (refused(408, "RequestTimeout"), True, "RequestTimeout"),
        (silent, True, "no answer in time"),
        (lost, True, "the connection was closed"),
        (cut, True, "the connection was closed"),
    ],
)
@pytest.mark.parametrize("name", ["put", "swap, update"])
def test_it_is_told_whether_another_try_may_help(
    failing: FailingS3, name: str, fault: Fault, retriable: bool, said: str
) -> None:
    """If the same answer is to be expected, the error says that a retry is useless."""
    bucket = cloud(failing.server, retry_config=QUICK, client_options={"timeout": patience(fault)})
    failing.always = fault
    error = failure(CALLS[name], bucket)
    assert (error.retriable, said in error.why) == (retriable, True), error.why


def test_a_put_that_meets_nothing_is_no_missing_object(failing: FailingS3, bucket: CloudBucket) -> None:
    """Some servers answer so if the bucket is missing, or if the client may not see it."""
    failing.always = refused(404, "NoSuchKey")
    assert not failure(CALLS["put"], bucket).retriable


def test_a_store_that_minds_deleting_what_is_gone_deletes_the_others(tmp_path: Path) -> None:
    """Some object stores raise for a missing object, also obstore's for local files."""
    bucket = CloudBucket(f"file://{tmp_path}")
    for name in ("a", "b", "c"):
        bucket.put(name, b"x")
    bucket.delete(["gone", "a", "gone too", "c", "a"])
    assert [found.key for found in bucket.list()] == ["b"]


def test_a_download_that_is_cut_goes_on(failing: FailingS3, bucket: CloudBucket) -> None:
    """A cut at any part is retried; if every download is cut, the error says so."""
    data = os.urandom((8 << 20) + 100_000)
    bucket.put("small", data[:100_000])
    failing.objects[f"/{BUCKET}/place/large"] = data
    for fault in (cut, silent_then_cut):
        failing.faults = [cut]
        assert bucket.get("small")[0] == data[:100_000]
        failing.faults = [cut]
        assert bucket.get_range("small", 10, 90_000) == data[10:90_010]
        failing.faults = [fault, refused(503, "SlowDown"), cut]
        assert bucket.get("large")[0] == data
    failing.always = cut
    error = failure(lambda bucket: bucket.get("small"), bucket)
    assert error.retriable


def silent_then_cut(handler: Any) -> None:
    """Wait 50 ms, then close the connection as `cut` does."""
    time.sleep(0.05)
    cut(handler)


def test_a_large_object_that_changes_while_it_is_read_is_no_mixture(failing: FailingS3, bucket: CloudBucket) -> None:
    """Parts of two are never put together."""
    path = f"/{BUCKET}/place/large"
    failing.objects[path] = bytes(9 << 20)

    def change(handler: Any) -> None:
        failing.objects[path] = b"x" * (9 << 20)
        handler.read_body()
        handler.answer(*handler.do())

    failing.faults = [
        lambda handler: handler.answer(*handler.do()),
        lambda handler: handler.answer(*handler.do()),
        change,
    ]
    with pytest.raises(PreconditionFailed):
        bucket.get("large")
    assert bucket.get("large")[0] == b"x" * (9 << 20)


# ---------------------------------------------------------------- conditional puts whose outcome is not told


def test_a_swap_whose_answer_is_lost_is_not_taken_for_done(failing: FailingS3, bucket: CloudBucket) -> None:
    """The swap raises although it took effect: the caller must read the object."""
    tag = bucket.compare_and_swap("m", b"1", None)
    failing.faults = [lost] * TRIES
    with pytest.raises(ObjectStoreError):
        bucket.compare_and_swap("m", b"2", tag)
    assert bucket.get("m")[0] == b"2"


def test_a_swap_that_was_done_and_answered_with_an_error_is_refused_the_second_time(
    failing: FailingS3, bucket: CloudBucket
) -> None:
    """obstore asks again: what it then meets is its own put, and that is how it looks."""
    tag = bucket.compare_and_swap("m", b"1", None)
    failing.faults = [refused_though_done(500, "InternalError")]
    with pytest.raises(PreconditionFailed):
        bucket.compare_and_swap("m", b"2", tag)
    assert bucket.get("m")[0] == b"2"


@pytest.mark.parametrize(
    "fault", [lost, refused_though_done(500, "InternalError"), refused(503, "SlowDown"), cut, silent]
)
def test_shipping_finds_out_what_became_of_a_put(tmp_path: Path, failing: FailingS3, fault: Fault) -> None:
    """After any failed request, with any fault, the next cycle ships everything, and a restore has it."""
    options = {"retry_config": {"max_retries": 0}, "client_options": {"timeout": patience(fault)}}
    bucket = cloud(failing.server, **options)
    for number in range(3):
        failing.objects.clear()
        path = tmp_path / f"{number}"
        with LogStore(path / "store", background=False) as store:
            log = store.create_topic("t").partition(0)
            shipper = Shipper(store._topics, bucket)
            log.append([b"0"], ack="durable")
            until_shipped(shipper, log, 1)
            for count in range(1, 4):
                log.append([b"%d" % count], ack="durable")
                failing.faults = [answered] * number + [fault]
                until_shipped(shipper, log, count + 1)
            failing.faults = []
            shipper.close()
        restore(cloud(failing.server), str(path / "restored"))
        with LogStore(path / "restored", background=False) as restored:
            log = restored.topic("t").partition(0)
            found = [record.value for batch in log.read(0) for record in batch]
            assert found == [b"0", b"1", b"2", b"3"]


def until_shipped(shipper: Shipper, log: Partition, offset: int) -> None:
    """Tick until it is, whatever fails meanwhile: on a busy machine also an answer that is too late."""
    for _ in range(100):
        with contextlib.suppress(ObjectStoreError):
            shipper.run_cycle()
        if log.shipped_offset == offset:
            return
    raise AssertionError(f"shipped up to {log.shipped_offset} only")


@pytest.mark.parametrize("ignores", [("if-none-match",), ("if-match",), ("if-none-match", "if-match")])
def test_a_server_that_takes_no_notice_of_conditions_is_refused(
    failing: FailingS3, bucket: CloudBucket, ignores: tuple[str, ...]
) -> None:
    """It is refused before it is used: two owners could overwrite each other's objects."""
    failing.ignores = ignores
    with pytest.raises(ConditionIgnored, match="ignores conditional writes") as caught:
        bucket.compare_and_swap("m", b"1", None)
    assert not caught.value.retriable


def test_whether_it_heeds_them_is_looked_at_once(failing: FailingS3, bucket: CloudBucket) -> None:
    """A swap of what is there is one request."""
    tag = bucket.compare_and_swap("m", b"1", None)
    failing.asked.clear()
    bucket.compare_and_swap("m", b"2", tag)
    assert [one.method for one in failing.asked] == ["PUT"]


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize("call", [CALLS[name] for name in ("get", "get_range", "put", "swap, create", "swap, update")])
@pytest.mark.parametrize("given", ["options", "environment"])
def test_secrets_that_a_server_repeats_are_not_told(
    failing: FailingS3, monkeypatch: pytest.MonkeyPatch, call: Call, given: str
) -> None:
    """Errors contain no secrets from options or from the environment."""
    options = failing.server.options | {"session_token": TOKEN, "retry_config": QUICK}
    if given == "environment":
        for name, value in (failing.server.environment | {"AWS_SESSION_TOKEN": TOKEN}).items():
            monkeypatch.setenv(name, value)
        options = {"retry_config": QUICK, "client_options": {"pool_max_idle_per_host": "0"}}
    bucket = CloudBucket(f"s3://user:plantedpassword@{BUCKET}/place", **options)
    failing.always = repeating
    error = failure(call, bucket)
    assert "SignatureDoesNotMatch" in error.why
    assert failing.asked[0].headers["x-amz-security-token"] == TOKEN
    assert KEY_ID in failing.asked[0].headers["authorization"]
    assert_no_secret(error, repr(bucket), bucket.url)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{KEY_ID}:plantedpassword@bucket/place",
        "s4://user:plantedpassword@bucket/place",
        "https://account.blob.core.windows.net/container?sv=2024&sig=plantedsignature",
        "https://account.blob.core.windows.net/?sig=plantedsignature",
        "file://user:plantedpassword@host/folder",
        "file:///folder?sig=plantedsignature",
    ],
)
def test_secrets_in_a_url_are_not_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """This holds whether the URL can be opened or not."""
    caplog.set_level(logging.DEBUG)
    try:
        bucket = open_bucket(url)
    except InvalidConfig as error:
        assert_no_secret(error, caplog.text)
    else:
        for secret in PLANTED:
            assert secret not in bucket.url + repr(bucket) + caplog.text


@pytest.mark.parametrize("scheme", ["abfs", "abfss", "ABFSS"])
def test_the_container_in_a_url_is_no_secret(scheme: str) -> None:
    """It says where the objects are, and the store's files refer to it."""
    url = f"{scheme}://container@account.dfs.core.windows.net/place"
    assert open_bucket(f"{url}/").url == url
    assert open_bucket(open_bucket(url).url).url == url
    assert without_secrets(f"{scheme}://user:password@host/place") == f"{scheme}://host/place"


def test_secrets_get_neither_into_the_log_nor_into_the_store(
    tmp_path: Path, failing: FailingS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store is shipped in the background, to a server that refuses everything and repeats the secrets."""
    caplog.set_level(logging.DEBUG)
    for name, value in (failing.server.environment | {"AWS_SESSION_TOKEN": TOKEN}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_POOL_MAX_IDLE_PER_HOST", "0")
    url = f"s3://user:plantedpassword@{BUCKET}/place"
    with segmentlog.open(tmp_path / "store", ship=url, ship_interval_ms=20) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"x"], ack="shipped")
        failing.always = repeating
        log.append([b"y"], ack="durable")
        wait_until(lambda: "ship" in store.health())
        told = [str(store.health()), str(store.shipping.status()), str(store.shipping.url)]
    told += [record.getMessage() + str(record.exc_text) for record in caplog.records] + [caplog.text]
    assert "SignatureDoesNotMatch" in "".join(told)
    kept = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    kept += list(failing.objects.values())
    for secret in PLANTED:
        assert not [text for text in told if secret in text]
        assert not [data for data in kept if secret.encode() in data]


# ---------------------------------------------------------------- what the environment says


@pytest.mark.parametrize("endpoint", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
@pytest.mark.parametrize("region", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_the_variables_that_users_know_are_heeded(
    failing: FailingS3, monkeypatch: pytest.MonkeyPatch, endpoint: str, region: str
) -> None:
    """Endpoint, region, keys, a token, http, and settings of connections."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    given = failing.server.environment | {"AWS_SESSION_TOKEN": TOKEN, "AWS_POOL_MAX_IDLE_PER_HOST": "0"}
    given[endpoint] = given.pop("AWS_ENDPOINT_URL")
    given[region] = given.pop("AWS_REGION")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    bucket = open_bucket(f"s3://{BUCKET}/a/place/")
    bucket.put("key", b"x")
    assert bucket.url == f"s3://{BUCKET}/a/place"
    (asked,) = failing.asked
    assert (asked.method, asked.path) == ("PUT", f"/{BUCKET}/a/place/key")
    assert f"Credential={KEY_ID}/" in asked.headers["authorization"]
    assert f"/{REGION}/s3/" in asked.headers["authorization"]
    assert asked.headers["x-amz-security-token"] == TOKEN


def test_http_has_to_be_allowed(failing: FailingS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to allow it."""
    for name, value in failing.server.environment.items():
        if name != "AWS_ALLOW_HTTP":
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    error = failure(CALLS["get"], CloudBucket(f"s3://{BUCKET}/place", retry_config=QUICK))
    assert "AWS_ALLOW_HTTP=true" in error.why
    assert not error.retriable
    assert not failing.asked


def test_how_long_a_request_may_take_can_be_said(failing: FailingS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of a slow connection can set it."""
    for name, value in (failing.server.environment | {"AWS_TIMEOUT": "200ms"}).items():
        monkeypatch.setenv(name, value)
    failing.always = silent
    began_s = time.monotonic()
    failure(CALLS["put"], CloudBucket(f"s3://{BUCKET}/place", retry_config={"max_retries": 0}))
    assert time.monotonic() - began_s < 20


# ---------------------------------------------------------------- forks, and a package that is not there


def test_a_forked_child_is_told_that_it_cannot() -> None:
    """obstore's threads are in the parent: the child would wait for them forever."""
    script = (
        "import os\n"
        "from segmentlog.objects.bucket.cloud_bucket import CloudBucket\n"
        "options = dict(endpoint='http://127.0.0.1:1', region='r', access_key_id='k', secret_access_key='secret',\n"
        "               client_options={'allow_http': True}, retry_config={'max_retries': 0})\n"
        "def try_it(bucket):\n"
        "    try:\n"
        "        bucket.get('key')\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error.retriable, 'forked' in str(error), flush=True)\n"
        "before = CloudBucket('s3://bucket', **options)\n"
        "try_it(before)\n"
        "if os.fork() == 0:\n"
        "    try_it(before)\n"
        "    try_it(CloudBucket('s3://bucket', **options))\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "try_it(before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    theirs, ours = "ObjectStoreError False True", "ObjectStoreError True False"
    assert done.stdout.splitlines() == [ours, theirs, theirs, ours]


def test_without_obstore_a_folder_works_and_the_rest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for other URLs says how to install it."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    open_bucket(f"file://{tmp_path}/b").put("key", b"x")
    with pytest.raises(InvalidConfig, match=r"pip install '\.\[objects\]' in a clone"):
        open_bucket("s3://bucket/place")
    with pytest.raises(ObjectMissing):
        open_bucket(f"file://{tmp_path}/b").get("other")
