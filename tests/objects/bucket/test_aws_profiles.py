"""Credentials of S3: profiles are read as AWS's tools read them, and no metadata service is asked instead of one."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import objects.buckets  # noqa: F401  (it starts obstore's threads)
import pytest

from segmentlog.errors import InvalidConfig, ObjectStoreError
from segmentlog.objects.bucket.aws_profiles import profile_options
from segmentlog.objects.bucket.base import ObjectMissing
from segmentlog.objects.bucket.url import open_bucket

pytest.importorskip("obstore")
pytest.importorskip("botocore")

_URL = "s3://bucket/store"
_NOT_THERE = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>no</Message></Error>"
_EXPIRES = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
_ASSUMED = f"""<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIAASSUMEDROLE00000</AccessKeyId><SecretAccessKey>assumed-secret</SecretAccessKey>
<SessionToken>assumed-token</SessionToken><Expiration>{_EXPIRES}</Expiration></Credentials>
<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/r/s</Arn><AssumedRoleId>a:s</AssumedRoleId></AssumedRoleUser>
</AssumeRoleResult></AssumeRoleResponse>""".encode()


class Services:
    """S3, STS, SSO and the metadata service of an instance, at one address; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        """(path, id of the access key that signed)"""
        self.regions: set[str] = set()
        self.tokens: set[str] = set()
        services = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                services._answer(self)

            do_PUT = do_HEAD = do_POST = do_GET

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        signed = re.search(r"Credential=(\w+)/\d+/([\w-]+)/", request.headers.get("authorization") or "")
        self.asked.append((request.path.partition("?")[0], signed[1] if signed else ""))
        status, kind, data = 404, "application/xml", _NOT_THERE
        if parse_qs(body.decode("latin-1")).get("Action") == ["AssumeRole"]:
            status, data = 200, _ASSUMED
        elif request.path.startswith("/federation/credentials"):
            status, kind = 200, "application/json"
            keys = {"accessKeyId": "ASIASSOROLE000000000", "secretAccessKey": "s", "sessionToken": "sso-token"}
            expires = int(datetime.now(UTC).timestamp() * 1000) + 3_600_000
            data = json.dumps({"roleCredentials": {**keys, "expiration": expires}}).encode()
        elif signed:
            self.regions.add(signed[2])
            self.tokens.add(request.headers.get("x-amz-security-token") or "")
        request.send_response(status)
        request.send_header("content-type", kind)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @property
    def paths(self) -> list[str]:
        """Paths of the requests."""
        return [path for path, _ in self.asked]

    def keys_at_s3(self) -> set[str]:
        """Ids of the keys that requests to the bucket were signed with; nothing else of an instance was asked."""
        assert not [path for path in self.paths if path.startswith("/latest")], "the metadata service was asked"
        return {key for path, key in self.asked if path.startswith("/bucket/")}

    def close(self) -> None:
        """End it."""
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Services]:
    """Yield the services that a machine may ask, with an empty home and without AWS variables in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    running = Services()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ENDPOINT_URL_STS", "ENDPOINT_URL_SSO", "METADATA_ENDPOINT", "EC2_METADATA_SERVICE_ENDPOINT"):
        monkeypatch.setenv(f"AWS_{name}", running.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / ".aws").mkdir()
    try:
        yield running
    finally:
        running.close()


def ask(url: str = _URL) -> None:
    """Send one request to the bucket; the services have nothing there."""
    with pytest.raises(ObjectMissing):
        open_bucket(url).get("manifest.json")


def write(home: Path, name: str, text: str) -> None:
    """Write a file of profiles."""
    (home / ".aws" / name).write_text(text)


KEYS = "aws_access_key_id = {}\naws_secret_access_key = a-secret-of-a-profile\n"


def test_a_named_profile(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile takes its keys from ~/.aws/credentials, and its region from ~/.aws/config."""
    write(tmp_path, "credentials", "[default]\n" + KEYS.format("AKIADEFAULT") + "[work]\n" + KEYS.format("AKIAWORK"))
    write(tmp_path, "config", "[profile work]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    ask()
    assert services.keys_at_s3() == {"AKIAWORK"}
    assert services.regions == {"eu-north-1"}


def test_the_default_profile(services: Services, tmp_path: Path) -> None:
    """The default profile applies if the environment has no profile name and no keys."""
    write(tmp_path, "credentials", "[default]\n" + KEYS.format("AKIADEFAULT"))
    ask()
    assert services.keys_at_s3() == {"AKIADEFAULT"}


def test_files_in_other_places(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name the files; the profile may have an endpoint."""
    (tmp_path / "c").write_text("[work]\n" + KEYS.format("AKIAELSEWHERE"))
    (tmp_path / "d").write_text(f"[profile work]\nregion = eu-west-3\nendpoint_url = {services.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "c"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "d"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    ask()
    assert services.keys_at_s3() == {"AKIAELSEWHERE"}
    assert services.regions == {"eu-west-3"}


def test_keys_in_the_environment_come_first(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AWS's tools, keys in the environment win; the region is still the profile's."""
    write(tmp_path, "credentials", "[work]\n" + KEYS.format("AKIAWORK") + "region = eu-north-1\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-environment")
    ask()
    assert services.keys_at_s3() == {"AKIAENVIRONMENT"}
    assert services.regions == {"eu-north-1"}


def test_a_process_that_gives_keys(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``credential_process`` provides the keys."""
    keys = {"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "s", "SessionToken": "token-of-a-process"}
    (tmp_path / "keys").write_text(json.dumps(keys))
    program = f"{sys.executable} -c 'print(open(\"{tmp_path}/keys\").read())'"
    write(tmp_path, "config", f"[profile work]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    ask()
    assert services.keys_at_s3() == {"AKIAPROCESS"}
    assert services.tokens == {"token-of-a-process"}


def test_a_role_to_assume(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role is assumed with the keys of another profile."""
    write(tmp_path, "credentials", "[base]\n" + KEYS.format("AKIABASE"))
    write(
        tmp_path, "config", "[profile work]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\nregion = x-y-1\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    ask()
    assert services.keys_at_s3() == {"ASIAASSUMEDROLE00000"}
    assert ("/", "AKIABASE") in services.asked


def _log_in(home: Path, expires: datetime) -> None:
    write(
        home,
        "config",
        "[profile work]\nsso_session = s\nsso_account_id = 1\nsso_role_name = r\nregion = eu-west-1\n"
        "[sso-session s]\nsso_region = eu-west-1\nsso_start_url = https://example.com/start\n",
    )
    cache = home / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    token = {"accessToken": "t", "expiresAt": expires.strftime("%Y-%m-%dT%H:%M:%SZ"), "region": "eu-west-1"}
    (cache / f"{hashlib.sha1(b's').hexdigest()}.json").write_text(json.dumps(token))


def _asked_by_a_child() -> str:
    """Return the error of a request in another process: botocore looks for the home folder when it is imported."""
    script = f"from segmentlog.objects.bucket.url import open_bucket; open_bucket({_URL!r}).get('manifest.json')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    return done.stderr.splitlines()[-1]


def test_single_sign_on(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is that of ``aws sso login``."""
    _log_in(tmp_path, datetime.now(UTC) + timedelta(hours=8))
    monkeypatch.setenv("AWS_PROFILE", "work")
    told = _asked_by_a_child()
    assert "ObjectMissing" in told
    assert services.keys_at_s3() == {"ASIASSOROLE000000000"}, told


def test_single_sign_on_that_has_expired(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the profile and the reason; no metadata service is asked."""
    _log_in(tmp_path, datetime.now(UTC) - timedelta(hours=8))
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert re.search(r"cannot get credentials for the AWS profile 'work': .*expired", _asked_by_a_child())
    assert services.keys_at_s3() == set()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("[profile other]\nregion = x\n", r"'work' is not valid: a profile in .*/\.aws/credentials or .*/\.aws/config"),
        ("[profile work]\nregion = x\n", r"'work' is not valid: a profile with credentials; .* contain none for it"),
        ("[profile work]\nrole_arn = r\nsource_profile = nobody\n", r"gives credentials \(.*nobody"),
        ("[profile work]\ncredential_process = false\n", r"gives credentials \(.*retrieving credentials"),
        ("[profile work\n", r"gives credentials \(botocore: Unable to parse config file"),
    ],
)
def test_a_profile_that_cannot_be_used(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, why: str
) -> None:
    """The error names the profile and the reason when the bucket is opened, before any request."""
    write(tmp_path, "config", config)
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(InvalidConfig, match=rf"AWS_PROFILE = .*{why}"):
        open_bucket(_URL)
    assert not services.asked


def test_a_profile_without_botocore(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which extra reads it, and what does without; keys in the environment need none."""
    write(tmp_path, "credentials", "[work]\n" + KEYS.format("AKIAWORK"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(InvalidConfig, match=r"\[aws\].*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_bucket(_URL)
    assert not services.asked
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-environment")
    ask()
    assert services.keys_at_s3() == {"AKIAENVIRONMENT"}


def test_without_any_credentials_the_places_are_named(services: Services, tmp_path: Path) -> None:
    """The metadata service is asked then, and only then; the error does not stop at its address."""
    write(tmp_path, "config", "[default]\nregion = eu-west-1\n")
    with pytest.raises(ObjectStoreError, match=r"no credentials were found in AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        open_bucket(_URL).get("manifest.json")
    assert any(path.startswith("/latest/") for path in services.paths)


def test_the_secret_of_a_profile_is_shown_nowhere(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret is also removed from a refused request that the server repeats."""
    write(tmp_path, "credentials", "[work]\n" + KEYS.format("AKIAWORK"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    repeated = b"<Error><Code>SignatureDoesNotMatch</Code><Message>a-secret-of-a-profile</Message></Error>"
    monkeypatch.setitem(globals(), "_NOT_THERE", repeated)
    with pytest.raises(ObjectStoreError, match="SignatureDoesNotMatch") as raised:
        open_bucket(_URL).get("manifest.json")
    assert "a-secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["gs://bucket/x", "az://bucket/x", "https://example.com/x", "memory://"])
def test_other_stores_take_no_profile(services: Services, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Profiles apply to AWS only."""
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert profile_options(url, {}) == {}


def test_what_the_caller_says_comes_first(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and settings that are given are not looked for."""
    write(tmp_path, "credentials", "[work]\nregion = a\n" + KEYS.format("AKIAWORK"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    given: dict[str, Any] = {"access_key_id": "x", "secret_access_key": "y"}
    assert profile_options(_URL, given) == {}
    assert "region" not in profile_options(_URL, {"region": "b"})
