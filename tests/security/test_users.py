"""The users file: its contents, its permissions, and that a change loses nothing."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from segmentlog.security import users as users_module
from segmentlog.security.saslprep import is_prepared, saslprep
from segmentlog.security.security_errors import InvalidUser, SecurityFileError
from segmentlog.security.users import Users, add_user, derive, list_users, remove_user
from segmentlog.storage.fs import FileSystem


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a path for a users file."""
    return str(tmp_path / "users.json")


def test_the_keys_are_those_of_rfc_7677() -> None:
    """The example has user, password `pencil`, and 4096 iterations."""
    import base64
    import hashlib
    import hmac

    made = derive("SCRAM-SHA-256", "pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)
    message = (
        b"n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,"
        b"i=4096,c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    )
    proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    mask = hmac.digest(made.stored_key, message, "sha256")
    client_key = bytes(a ^ b for a, b in zip(proof, mask, strict=True))
    assert hashlib.sha256(client_key).digest() == made.stored_key
    server = hmac.digest(made.server_key, message, "sha256")
    assert base64.b64encode(server) == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def test_users_are_added_changed_and_removed(path: str) -> None:
    """A password given to `add_user` is verified from then on, and no other; a removed user does not exist."""
    assert add_user(path, "ann", "one", iterations=4096)
    assert add_user(path, "bob", "two", iterations=4096)
    users = Users(path)
    assert users.verify("ann", "one")
    assert not users.verify("ann", "two")
    assert not users.verify("carl", "one")
    assert not add_user(path, "ann", "three", iterations=4096), "she is not new"
    users.reload()
    assert users.verify("ann", "three")
    assert not users.verify("ann", "one")
    assert remove_user(path, "ann")
    assert not remove_user(path, "ann")
    users.reload()
    assert not users.verify("ann", "three")
    assert [user.name for user in list_users(path)] == ["bob"]
    assert list_users(path)[0].mechanisms == ("SCRAM-SHA-256", "SCRAM-SHA-512")


def test_the_file_is_private_and_holds_no_password(path: str) -> None:
    """Mode 0600 whatever the umask and whatever it was; salts differ, even of equal passwords."""
    before = os.umask(0)
    try:
        add_user(path, "ann", "correct horse", iterations=4096)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        os.chmod(path, 0o644)
        add_user(path, "bob", "correct horse", iterations=4096)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    text = Path(path).read_text()
    assert "horse" not in text
    found = json.loads(text)["users"]
    salts = {found[name][mechanism]["salt"] for name in found for mechanism in found[name]}
    assert len(salts) == 4


def test_secrets_are_in_no_repr(path: str) -> None:
    """Neither a credential nor the file's contents show themselves in a traceback or a log."""
    add_user(path, "ann", "pw-is-secret", iterations=4096)
    users = Users(path)
    credential, _ = users.challenge("ann", "SCRAM-SHA-256")
    assert repr(credential) == "Credential(iterations=4096)"
    assert str(credential.stored_key) not in repr(users_module._decode(path, Path(path).read_bytes()))


def test_a_file_that_others_may_read_is_told(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning, and no refusal: groups may be meant."""
    add_user(path, "ann", "pw", iterations=4096)
    Users(path)
    assert not caplog.records
    os.chmod(path, 0o640)
    Users(path)
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "",
        "*",
        "ANONYMOUS",
        "x" * 256,
        "a\nb",
        "a\0b",
        "ﬁ",
        "a\u00a0b",
        "e\u0301",
        "\ud800",
        "soft\u00adhyphen",
        "\u05d0a",
    ],
)
def test_names_that_clients_send_differently_are_refused(path: str, name: str) -> None:
    """Names that rules could not distinguish from all users are refused, too."""
    with pytest.raises(InvalidUser):
        add_user(path, name, "pw", iterations=4096)
    assert not os.path.exists(path)


@pytest.mark.parametrize("password", ["", "pass\u00a0word", "ﬁre", "tab\t", "\U0001f600"])
def test_passwords_that_clients_send_differently_are_refused(path: str, password: str) -> None:
    """The message does not repeat them."""
    with pytest.raises(InvalidUser) as error:
        add_user(path, "ann", password, iterations=4096)
    assert not password or password not in str(error.value)


def test_accents_and_other_scripts_are_welcome(path: str) -> None:
    """Names and passwords that SASLprep leaves unchanged are accepted."""
    add_user(path, "Zoë", "pässwörd ß", iterations=4096)
    add_user(path, "안나", "שלום", iterations=4096)
    users = Users(path)
    assert users.verify("Zoë", "pässwörd ß")
    assert users.verify("안나", "שלום")


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        ("I\u00adX", "IX"), ("user", "user"), ("USER", "USER"), ("\u00aa", "a"), ("\u2168", "IX"), ("", ""),
        ("\u0007", None), ("\u0627\u0031", None), ("a\u00a0b", "a b"),
    ],
)  # fmt: skip
def test_saslprep_is_that_of_rfc_4013(text: str, prepared: str | None) -> None:
    """The examples of the RFC hold."""
    if prepared is None:
        with pytest.raises(ValueError, match="SASLprep"):
            saslprep(text)
        assert not is_prepared(text)
    else:
        assert saslprep(text) == prepared
        assert is_prepared(text) == (text == prepared)


@pytest.mark.parametrize("iterations", [0, -1, 4095, 1_000_001, 10**12])
def test_absurd_iterations_are_refused(path: str, iterations: int) -> None:
    """A count that is too small to protect anything, or that is larger than clients accept, is refused."""
    with pytest.raises(InvalidUser, match="iterations"):
        add_user(path, "ann", "pw", iterations=iterations)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda document: document.update(format=2), "format 2"),
        (lambda document: document.update(more=1), "more"),
        (lambda document: document.update(secret="AAAA"), "secret"),
        (lambda document: document["users"].update(ann={}), "no credentials"),
        (lambda document: document["users"]["ann"].update(MD5=document["users"]["ann"]["SCRAM-SHA-256"]), "MD5"),
        (lambda document: document["users"]["ann"]["SCRAM-SHA-256"].update(iterations=10**9), "iterations"),
        (lambda document: document["users"]["ann"]["SCRAM-SHA-256"].update(iterations=1), "iterations"),
        (lambda document: document["users"]["ann"]["SCRAM-SHA-256"].update(salt="AAAA"), "salt"),
        (lambda document: document["users"]["ann"]["SCRAM-SHA-256"].update(stored_key="AAAA"), "keys"),
        (lambda document: document["users"]["ann"]["SCRAM-SHA-256"].update(password="pw"), "password"),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(path: str, change: object, told: str) -> None:
    """At the start of a server and at a change: an invalid file is never overwritten."""
    add_user(path, "ann", "pw", iterations=4096)
    document = json.loads(Path(path).read_text())
    change(document)  # type: ignore[operator]
    Path(path).write_text(json.dumps(document))
    before = Path(path).read_bytes()
    for use in (lambda: Users(path), lambda: list_users(path), lambda: add_user(path, "bob", "pw", iterations=4096)):
        with pytest.raises(SecurityFileError) as error:
            use()
        assert path in str(error.value)
        assert told in str(error.value)
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize(
    "data",
    [
        '{"format": 1, "secret": "AAAA", "users": {"j\u00fcrgen": {}}}'.encode("latin-1"),
        b'{"format": 1, "users": ' + b'{"a":' * 100_000,
        b"[" * 100_000,
    ],
)
def test_what_is_no_text_is_refused_in_a_sentence(path: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Another encoding, or unterminated JSON; a running server keeps the previous users."""
    add_user(path, "ann", "pw", iterations=4096)
    users = Users(path)
    Path(path).write_bytes(data)
    with pytest.raises(SecurityFileError, match="not a users file") as error:
        list_users(path)
    assert "rgen" not in str(error.value)
    users.reload()
    assert users.verify("ann", "pw")
    assert "stay in effect" in caplog.text


def test_a_file_cut_anywhere_is_refused(path: str) -> None:
    """Any part of a file is refused; for `add_user`, an empty file is like a missing one."""
    add_user(path, "ann", "pw", iterations=4096)
    whole = Path(path).read_bytes().rstrip()
    for size in range(0, len(whole), 7):
        Path(path).write_bytes(whole[:size])
        with pytest.raises(SecurityFileError):
            Users(path)
    Path(path).write_bytes(b"")
    assert add_user(path, "bob", "pw", iterations=4096)
    assert [user.name for user in list_users(path)] == ["bob"]


def test_no_file_is_told_how_to_make_one(path: str) -> None:
    """Instead of starting a server that no client can use."""
    with pytest.raises(SecurityFileError, match="users add"):
        Users(path)
    with pytest.raises(SecurityFileError, match="does not exist"):
        remove_user(path, "ann")
    assert os.listdir(os.path.dirname(path)) == []


def test_a_file_that_breaks_later_leaves_who_is_known(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """One error is logged for each state of the file."""
    add_user(path, "ann", "pw", iterations=4096)
    users = Users(path)
    good = Path(path).read_bytes()
    with caplog.at_level(logging.INFO, "segmentlog.server"):
        Path(path).write_text("{")
        for _ in range(3):
            users.reload()
            assert users.verify("ann", "pw")
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        os.unlink(path)
        users.reload()
        assert users.verify("ann", "pw")
        assert len(caplog.records) == 2
        Path(path).write_bytes(good)
        os.chmod(path, 0o600)
        users.reload()
    add_user(path, "bob", "pw", iterations=4096)
    users.reload()
    assert users.verify("bob", "pw")


def _add_many(path: str, name: str) -> None:
    for number in range(10):
        add_user(path, f"{name}-{number}", "pw", iterations=4096)


def test_two_processes_add_and_lose_nobody(path: str) -> None:
    """Each process reads what the other wrote, and a server that reads meanwhile gets a complete file."""
    add_user(path, "ann", "pw", iterations=4096)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_many, args=(path, name)) for name in ("one", "two")]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert "ann" in {user.name for user in list_users(path)}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list_users(path)) == 21


class _Failing(FileSystem):
    """Fails at the n-th call of those that change something."""

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at
        self.replace = lambda old, new: self._step(os.replace, old, new)
        self.pwritev = lambda fd, buffers, position: self._step(os.pwritev, fd, buffers, position)
        self.fsync = lambda fd: self._step(os.fsync, fd)

    def _step(self, call, *arguments):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left == 0:
            raise OSError(5, "Input/output error")
        return call(*arguments)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_write_that_fails_leaves_the_old_file(path: str, fails_at: int) -> None:
    """Only the lock file remains next to it."""
    add_user(path, "ann", "pw", iterations=4096)
    before = Path(path).read_bytes()
    with pytest.raises(OSError, match="Input"):
        add_user(path, "bob", "pw", iterations=4096, fs=_Failing(fails_at))
    assert Path(path).read_bytes() == before
    assert sorted(os.listdir(os.path.dirname(path))) == ["users.json", "users.json.lock"]


def test_what_a_killed_process_left_is_used_up(path: str) -> None:
    """The half-written file of a killed process is ignored, and the next write replaces it."""
    add_user(path, "ann", "pw", iterations=4096)
    leftover = Path(path + ".tmp")
    leftover.write_text("{half")
    add_user(path, "bob", "pw", iterations=4096)
    assert not leftover.exists()
    assert len(list_users(path)) == 2


def test_a_link_stays_one(tmp_path: Path) -> None:
    """A users file that lies elsewhere is changed there."""
    (tmp_path / "secrets").mkdir()
    add_user(str(tmp_path / "secrets" / "users"), "ann", "pw", iterations=4096)
    link = tmp_path / "users"
    link.symlink_to("secrets/users")
    add_user(str(link), "bob", "pw", iterations=4096)
    assert link.is_symlink()
    assert len(list_users(str(link))) == 2


def test_unknown_users_look_like_others(path: str) -> None:
    """A name gets the same challenge each time, also after a restart, with the usual sizes and iterations."""
    for name in ("ann", "bob"):
        add_user(path, name, "pw", iterations=5000)
    add_user(path, "carl", "pw", iterations=9000)
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        known, is_known = Users(path).challenge("ann", mechanism)
        made_up, is_made_up_known = Users(path).challenge("nobody", mechanism)
        assert (is_known, is_made_up_known) == (True, False)
        assert made_up == Users(path).challenge("nobody", mechanism)[0]
        assert made_up.salt != Users(path).challenge("nobodies", mechanism)[0].salt
        assert made_up.iterations == known.iterations == 5000
        for one, other in zip(known_parts(known), known_parts(made_up), strict=True):
            assert len(one) == len(other)


def known_parts(credential: users_module.Credential) -> tuple[bytes, bytes, bytes]:
    """Return the random parts of a challenge."""
    return credential.salt, credential.stored_key, credential.server_key


def test_a_change_is_logged_with_counts(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log line counts added, removed and changed users; it has no name, salt or key."""
    caplog.set_level(logging.INFO, "segmentlog.server")
    for name in ("ann", "bob", "zoe"):
        add_user(path, name, "secret", iterations=4096)
    users = Users(path)
    remove_user(path, "bob")
    add_user(path, "ann", "other", iterations=4096)
    add_user(path, "kim", "secret", iterations=4096)
    users.reload()
    users.reload()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 users; 1 added, 1 removed, 1 with another password" in line
    assert not any(word in line.replace(path, "") for word in ("ann", "bob", "kim", "secret"))
