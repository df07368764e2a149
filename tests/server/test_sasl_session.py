"""SASL: a client with the right password is accepted in each way that clients use; others are rejected."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from security.scram_client import ScramClient

from segmentlog.security.mechanisms import MECHANISMS, SCRAM_MECHANISMS
from segmentlog.security.principals import Principal
from segmentlog.security.users import Users, add_user, derive, remove_user
from segmentlog.server.codec.generated.sasl_authenticate import SaslAuthenticateRequest
from segmentlog.server.codec.generated.sasl_handshake import SaslHandshakeRequest
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.handlers.sasl_handlers import sasl_authenticate, sasl_handshake
from segmentlog.server.sasl_session import SaslSession

NAME, PASSWORD = "Zoë, =)", "pässwörd, = ß"
ANN = Principal("User", NAME)
FAILED = ErrorCode.SASL_AUTHENTICATION_FAILED
HANDSHAKE, VERSIONS, AUTHENTICATE, PRODUCE, METADATA = 17, 18, 36, 0, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of two users."""
    path = str(tmp_path_factory.mktemp("users") / "users.json")
    add_user(path, NAME, PASSWORD, iterations=4096)
    add_user(path, "bob", "other", iterations=4096)
    return path


@pytest.fixture
def users(path: str) -> Users:
    """Return the users as a server reads them."""
    return Users(path)


def scram(session: SaslSession, mechanism: str, name: str, password: str, **options: Any) -> tuple[int, str | None]:
    """Return a whole exchange: how it ended."""
    assert session.handshake(mechanism)[0] == ErrorCode.NONE
    client = ScramClient(mechanism, name, password, **options)
    error_code, message, answer = session.authenticate(client.first())
    if error_code:
        return error_code, message
    error_code, message, answer = session.authenticate(client.final(answer))
    assert bool(error_code) or client.check(answer), "the server proves that it knows the password as well"
    return error_code, message


def plain(name: str, password: str, authorize: str = "") -> bytes:
    """Return the one token of PLAIN."""
    return "\0".join((authorize, name, password)).encode()


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_scram_lets_in_who_has_the_password(users: Users, mechanism: str) -> None:
    """Names and passwords may have commas, equals signs and accents.

    The principal is known only after the last token.
    """
    session = SaslSession(users)
    assert session.principal is None
    assert scram(session, mechanism, NAME, PASSWORD) == (ErrorCode.NONE, None)
    assert session.principal == ANN
    assert session.is_complete
    assert not session.has_failed


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_scram_works_with_clients_of_others(users: Users, mechanism: str) -> None:
    """scramp's, which prepares what it is given, and kafka-python's, which does not."""
    import scramp
    from kafka.net.sasl.scram import ScramClient as KafkaClient

    session = SaslSession(users)
    session.handshake(mechanism)
    client = scramp.ScramClient([mechanism], NAME, PASSWORD)
    _, _, answer = session.authenticate(client.get_client_first().encode())
    client.set_server_first(answer.decode())
    _, _, answer = session.authenticate(client.get_client_final().encode())
    client.set_server_final(answer.decode())
    assert session.principal == ANN

    session = SaslSession(users)
    session.handshake(mechanism)
    other = KafkaClient("bob", "other", mechanism)
    _, _, answer = session.authenticate(other.first_message())
    other.process_server_first_message(answer)
    _, _, answer = session.authenticate(other.final_message())
    other.process_server_final_message(answer)
    assert session.principal == Principal("User", "bob")


def test_plain_lets_in_who_has_the_password(users: Users) -> None:
    """The authorization id may be the same name, or empty."""
    for authorize in ("", NAME):
        session = SaslSession(users)
        session.handshake("PLAIN")
        assert session.authenticate(plain(NAME, PASSWORD, authorize)) == (ErrorCode.NONE, None, b"")
        assert session.principal == ANN


@pytest.mark.parametrize(
    "token",
    [
        plain(NAME, "wrong"), plain("nobody", PASSWORD), plain(NAME, ""), plain("", PASSWORD),
        plain(NAME, PASSWORD, "bob"),
        b"", b"\0", b"\0\0", b"\0\0\0", plain(NAME, PASSWORD) + b"\0", b"\xff\xfe\0a\0b", plain("x" * 8000, "x"),
        b"\0" + b"x" * (1 << 20) + b"\0y", plain("a\u0007", "b"), plain("*", "x"), plain(NAME, PASSWORD + " "),
    ],
)  # fmt: skip
def test_plain_refuses_all_else(users: Users, token: bytes) -> None:
    """Wrong, empty, too many parts, no UTF-8, long; with the same message, which holds nothing of it."""
    session = SaslSession(users)
    session.handshake("PLAIN")
    error_code, message, answer = session.authenticate(token)
    assert (error_code, answer) == (FAILED, b"")
    assert message in ("Authentication failed: Invalid username or password", "the token is longer than 8192 bytes")
    assert session.has_failed
    assert session.principal is None


def test_plain_refuses_a_token_cut_anywhere(users: Users) -> None:
    """A prefix of a valid token is not valid."""
    whole = plain("bob", "other")
    for size in range(len(whole)):
        session = SaslSession(users)
        session.handshake("PLAIN")
        assert session.authenticate(whole[:size])[0] == FAILED


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_wrong_and_unknown_are_refused_alike(users: Users, mechanism: str) -> None:
    """Both get a challenge, and fail at the same step with the same message."""
    known = scram(SaslSession(users), mechanism, NAME, "wrong")
    unknown = scram(SaslSession(users), mechanism, "nobody", PASSWORD)
    assert known == unknown
    assert known[0] == FAILED
    assert "nobody" not in str(known[1])


def test_a_credential_of_one_mechanism_is_none_for_the_other(users: Users) -> None:
    """Proofs are bound to their hash."""
    session = SaslSession(users)
    session.handshake("SCRAM-SHA-512")
    client = ScramClient("SCRAM-SHA-256", NAME, PASSWORD)
    _, _, answer = session.authenticate(client.first())
    assert session.authenticate(client.final(answer))[0] == FAILED


def test_a_replayed_exchange_is_refused(users: Users) -> None:
    """Every challenge differs, also for the same nonce of a client."""
    client = ScramClient("SCRAM-SHA-256", NAME, PASSWORD, nonce="fixed")
    session = SaslSession(users)
    session.handshake("SCRAM-SHA-256")
    _, _, challenge = session.authenticate(client.first())
    final = client.final(challenge)
    assert session.authenticate(final)[0] == ErrorCode.NONE
    other = SaslSession(users)
    other.handshake("SCRAM-SHA-256")
    assert other.authenticate(client.first())[2] != challenge
    assert other.authenticate(final)[0] == FAILED


def begun(users: Users) -> tuple[SaslSession, ScramClient]:
    """Return a session that waits for the first token, and a client that has it."""
    session = SaslSession(users)
    session.handshake("SCRAM-SHA-256")
    return session, ScramClient("SCRAM-SHA-256", "bob", "other", nonce="0123456789")


def _doubled(client: ScramClient, server_first: bytes) -> str:
    """Return the nonce of librdkafka before 2.6.1: its own, followed by the server's, which begins with its own."""
    return client.nonce + client.parse(server_first)[0]


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_old_librdkafka_sends_its_nonce_twice_and_gets_in(users: Users, mechanism: str) -> None:
    """The password must be right, and the server proves itself; Debian's kcat has librdkafka 2.0.2."""
    session, client = (
        SaslSession(users),
        ScramClient(mechanism, NAME, PASSWORD, nonce="-./0189:;<=>?@AZ[]^_`az{|}~nonce"),
    )
    session.handshake(mechanism)
    _, _, server_first = session.authenticate(client.first())
    code, message, answer = session.authenticate(client.final(server_first, nonce=_doubled(client, server_first)))
    assert (code, message) == (ErrorCode.NONE, None)
    assert session.principal == ANN
    assert client.check(answer)


def test_a_wrong_password_with_the_nonce_twice_is_refused(users: Users) -> None:
    """The nonce that is accepted is no way around the proof."""
    session, client = SaslSession(users), ScramClient("SCRAM-SHA-256", NAME, "wrong")
    session.handshake("SCRAM-SHA-256")
    _, _, server_first = session.authenticate(client.first())
    token = client.final(server_first, nonce=_doubled(client, server_first))
    assert session.authenticate(token)[0] == FAILED
    assert session.principal is None


def test_no_other_nonce_is_accepted(users: Users) -> None:
    """Only the nonce of this exchange, in that form, is accepted: not the client's part, and not another one."""
    other = begun(users)
    other_first = other[0].authenticate(other[1].first())[2]
    forms = [
        lambda own, full: own,
        lambda own, full: full.removeprefix(own),
        lambda own, full: own + own + full,
        lambda own, full: full + full,
        lambda own, full: "x" + full,
        lambda own, full: own + full + "x",
        lambda own, full: own + other[1].parse(other_first)[0],
    ]
    for form in forms:
        session, client = begun(users)
        _, _, server_first = session.authenticate(client.first())
        token = client.final(server_first, nonce=form(client.nonce, client.parse(server_first)[0]))
        assert session.authenticate(token)[0] == FAILED
        assert session.principal is None


def test_what_librdkafka_2_0_2_sends_byte_for_byte(path: str, users: Users, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-in of Debian's kcat 1.7.1, recorded: with the salt and the server's nonce of that day it gets in again."""
    recorded = json.loads((Path(__file__).parent / "librdkafka_2_0_2_scram.json").read_text())
    credential = derive(recorded["mechanism"], recorded["password"], bytes.fromhex(recorded["salt"]), 4096)
    monkeypatch.setattr(users, "challenge", lambda name, mechanism: (credential, name == recorded["name"]))
    monkeypatch.setattr("scramp.core.token_hex", lambda: recorded["server_nonce"])
    session = SaslSession(users)
    session.handshake(recorded["mechanism"])
    sent = [token.encode() for token in recorded["sent"]]
    code, _, server_first = session.authenticate(sent[0])
    assert (code, server_first.decode()) == (ErrorCode.NONE, recorded["server_first"])
    assert sent[1].decode().count(recorded["client_nonce"]) == 2
    code, _, server_final = session.authenticate(sent[1])
    assert (code, server_final.decode()) == (ErrorCode.NONE, recorded["server_final"])


def test_scram_tokens_cut_anywhere_are_refused(users: Users) -> None:
    """A truncated first or second message causes an error, but no exception and no principal."""
    whole = ScramClient("SCRAM-SHA-256", "bob", "other", nonce="0123456789").first()
    end_of_name = whole.index(b",r=")
    for size in range(len(whole)):
        session, _ = begun(users)
        error_code, _, _ = session.authenticate(whole[:size])
        # Cut in the nonce it is a nonce, too: then the proof does not fit.
        assert error_code == FAILED or size > end_of_name + 3
        if not error_code:
            assert session.authenticate(b"c=biws,r=0,p=AAAA")[0] == FAILED
        assert session.principal is None
    session, client = begun(users)
    size = len(client.final(session.authenticate(client.first())[2]))
    for cut in range(size):
        session, client = begun(users)
        final = client.final(session.authenticate(client.first())[2])
        assert session.authenticate(final[:cut])[0] == FAILED
        assert session.principal is None


@pytest.mark.parametrize(
    "token",
    [
        b"", b",", b",,", b"n,,", b"n,,n=bob", b"n,,r=1", b"n,,n=,r=1", b"n,,r=1,n=bob", b"x,,n=bob,r=1",
        b"n,a=ann,n=bob,r=1", b"p=tls-unique,,n=bob,r=1", b"p=,,n=bob,r=1", b"n,,m=ext,n=bob,r=1",
        b"n,,n=b=ob,r=1", b"n,,n=bob,r=\x7f", b"n,,n=bob,r=a b", b"n,,n=\xff,r=1", b"n,,n=bob\0,r=1",
        b"n,,n=bob,n=ann,r=1", "n,,n=ﬁ\u0007,r=1".encode(), b"n,,n=" + b"x" * 9000 + b",r=1",
        b"\x00" * 100, b"n,,n=bob,r=1,tokenauth=true",
    ],
)  # fmt: skip
def test_garbled_first_messages_are_refused(users: Users, token: bytes) -> None:
    """Missing parts, unsupported channel bindings, other authorization ids, delegation tokens, bad UTF-8 fail."""
    session = SaslSession(users)
    session.handshake("SCRAM-SHA-256")
    assert session.authenticate(token)[0] == FAILED
    assert session.has_failed


def test_random_bytes_never_get_in(users: Users) -> None:
    """Flipped bits in a valid exchange do not get in, either; the result is always an error."""
    numbers = random.Random(4711)
    for round_, mechanism in zip(range(300), itertools.cycle(MECHANISMS), strict=False):
        session = SaslSession(users)
        session.handshake(mechanism)
        if round_ % 2 or mechanism == "PLAIN":
            token = numbers.randbytes(numbers.randrange(60))
        else:
            client = ScramClient(mechanism, "bob", "other")
            token = bytearray(client.final(session.authenticate(client.first())[2]))
            token[numbers.randrange(len(token))] ^= 1 << numbers.randrange(8)
        error_code, _, _ = session.authenticate(bytes(token))
        assert error_code == FAILED
        assert session.principal is None


def test_a_challenge_has_the_count_of_the_file(tmp_path: Path) -> None:
    """The count is that of `add_user`; clients refuse a million and one, and so does `add_user`."""
    path = str(tmp_path / "users")
    add_user(path, "ann", "pw", iterations=1_000_000)
    session = SaslSession(Users(path))
    session.handshake("SCRAM-SHA-256")
    client = ScramClient("SCRAM-SHA-256", "ann", "pw")
    assert client.parse(session.authenticate(client.first())[2])[2] == 1_000_000


@pytest.mark.parametrize("mechanism", ["GSSAPI", "", "plain", "SCRAM-SHA-1", "\0", "OAUTHBEARER"])
def test_other_mechanisms_are_answered_with_those_there_are(users: Users, mechanism: str) -> None:
    """As in Kafka, the connection is then closed."""
    session = SaslSession(users, SCRAM_MECHANISMS)
    assert session.handshake(mechanism) == (ErrorCode.UNSUPPORTED_SASL_MECHANISM, list(SCRAM_MECHANISMS))
    assert session.has_failed
    assert not session.permits(VERSIONS)


def test_a_mechanism_that_is_not_offered_is_none(users: Users) -> None:
    """PLAIN is not offered where others could listen."""
    assert SaslSession(users, SCRAM_MECHANISMS).handshake("PLAIN")[0] == ErrorCode.UNSUPPORTED_SASL_MECHANISM


def test_nothing_else_is_permitted_before(users: Users) -> None:
    """Before authentication only ApiVersions and SASL requests are allowed; after it every request is."""
    session = SaslSession(users)
    assert [key for key in range(100) if session.permits(key)] == [HANDSHAKE, VERSIONS, AUTHENTICATE]
    session.handshake("PLAIN")
    assert [key for key in range(100) if session.permits(key)] == [VERSIONS, AUTHENTICATE]
    session.authenticate(plain("bob", "other"))
    assert all(map(session.permits, range(100)))
    session = SaslSession(users)
    session.handshake("PLAIN")
    session.authenticate(plain("bob", "wrong"))
    assert not any(map(session.permits, range(100)))


def test_steps_out_of_turn_are_illegal(users: Users) -> None:
    """A token without a handshake, two handshakes, a token too many."""
    session = SaslSession(users)
    assert session.authenticate(plain("bob", "other"))[0] == ErrorCode.ILLEGAL_SASL_STATE
    assert session.has_failed
    assert session.handshake("PLAIN")[0] == ErrorCode.ILLEGAL_SASL_STATE

    session = SaslSession(users)
    session.handshake("SCRAM-SHA-256")
    assert session.handshake("PLAIN")[0] == ErrorCode.ILLEGAL_SASL_STATE
    assert session.authenticate(plain("bob", "other"))[0] == ErrorCode.ILLEGAL_SASL_STATE
    assert session.principal is None

    session = SaslSession(users)
    session.handshake("PLAIN")
    session.authenticate(plain("bob", "other"))
    assert session.authenticate(plain("bob", "other"))[0] == ErrorCode.ILLEGAL_SASL_STATE


def test_after_a_failure_there_is_no_second_try(users: Users) -> None:
    """On the same connection, a second attempt is refused: each guess costs a connection and a tenth of a second."""
    session = SaslSession(users)
    session.handshake("PLAIN")
    session.authenticate(plain("bob", "wrong"))
    assert session.authenticate(plain("bob", "other"))[0] == ErrorCode.ILLEGAL_SASL_STATE
    assert session.principal is None


def test_old_clients_send_bare_tokens(users: Users) -> None:
    """After a handshake of version 0, each answer has its length in front, and a failure has no answer."""
    session = SaslSession(users)
    session.handshake("SCRAM-SHA-256", 0)
    assert session.takes_raw_tokens
    client = ScramClient("SCRAM-SHA-256", "bob", "other")
    (answer,) = session.answer_raw(client.first()) or []
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    (answer,) = session.answer_raw(memoryview(client.final(bytes(answer[4:])))) or []
    assert client.check(bytes(answer[4:]))
    assert not session.takes_raw_tokens
    assert session.principal == Principal("User", "bob")

    session = SaslSession(users)
    session.handshake("PLAIN", 0)
    assert session.answer_raw(plain("bob", "wrong")) is None
    assert session.has_failed
    assert not session.takes_raw_tokens


def test_a_session_ends_and_is_proved_anew(users: Users) -> None:
    """KIP-368: the response has the lifetime; after it only SASL requests are allowed, and the same user continues."""
    now = [0.0]
    session = SaslSession(users, session_lifetime_ms=60_000, clock=lambda: now[0])
    scram(session, "SCRAM-SHA-256", "bob", "other")
    now[0] = 59.0
    assert session.permits(PRODUCE)
    now[0] = 60.0
    assert not session.permits(PRODUCE)
    assert session.permits(HANDSHAKE)
    session.handshake("SCRAM-SHA-256")
    assert not session.is_complete
    assert not session.permits(PRODUCE)
    client = ScramClient("SCRAM-SHA-256", "bob", "other")
    _, _, answer = session.authenticate(client.first())
    assert session.authenticate(client.final(answer))[0] == ErrorCode.NONE
    assert session.permits(PRODUCE)
    now[0] = 120.0
    assert not session.permits(METADATA)


def test_nobody_becomes_somebody_else(users: Users) -> None:
    """Re-authentication as another user, by another mechanism or with bare tokens ends the connection."""
    session = SaslSession(users)
    scram(session, "SCRAM-SHA-256", "bob", "other")
    assert scram(session, "SCRAM-SHA-256", NAME, PASSWORD) == (
        FAILED,
        "Cannot change principals during re-authentication",
    )
    assert session.has_failed
    for mechanism, version in (("PLAIN", 1), ("SCRAM-SHA-512", 1), ("SCRAM-SHA-256", 0)):
        session = SaslSession(users)
        scram(session, "SCRAM-SHA-256", "bob", "other")
        assert session.handshake(mechanism, version)[0] == ErrorCode.UNSUPPORTED_SASL_MECHANISM
        assert session.has_failed


def test_who_is_removed_cannot_prove_it_anew(tmp_path: Path) -> None:
    """So the lifetime of sessions bounds how long a removed user stays."""
    path = str(tmp_path / "users")
    add_user(path, "ann", "pw", iterations=4096)
    users = Users(path)
    session = SaslSession(users)
    scram(session, "SCRAM-SHA-256", "ann", "pw")
    remove_user(path, "ann")
    users.reload()
    assert scram(session, "SCRAM-SHA-256", "ann", "pw")[0] == FAILED


def test_no_secret_is_logged(users: Users, caplog: pytest.LogCaptureFixture) -> None:
    """Passwords are in no log line at any level, after right and wrong exchanges."""
    caplog.set_level(0)
    scram(SaslSession(users), "SCRAM-SHA-256", "bob", "other")
    for password in ("other", "guess-12345"):
        session = SaslSession(users)
        session.handshake("PLAIN")
        session.authenticate(plain("bob", password))
    assert "other" not in caplog.text
    assert "guess" not in caplog.text


def _call(session: SaslSession | None, version: int) -> Any:
    return SimpleNamespace(connection=SimpleNamespace(sasl=session), version=version)


def test_the_handlers_say_it_in_kafkas_words(users: Users) -> None:
    """SaslHandshake and SaslAuthenticate over the wire; only the last response has the lifetime."""
    session = SaslSession(users, session_lifetime_ms=5000)
    call = _call(session, 1)
    shaken = sasl_handshake(call, SaslHandshakeRequest(mechanism="SCRAM-SHA-512"))
    assert (shaken.error_code, shaken.mechanisms) == (0, list(MECHANISMS))
    client = ScramClient("SCRAM-SHA-512", "bob", "other")
    challenge = sasl_authenticate(call, SaslAuthenticateRequest(auth_bytes=client.first()))
    assert (challenge.error_code, challenge.session_lifetime_ms) == (0, 0)
    done = sasl_authenticate(call, SaslAuthenticateRequest(auth_bytes=client.final(bytes(challenge.auth_bytes))))
    assert (done.error_code, done.error_message, done.session_lifetime_ms) == (0, None, 5000)
    assert client.check(bytes(done.auth_bytes))

    call = _call(SaslSession(users), 1)
    sasl_handshake(call, SaslHandshakeRequest(mechanism="PLAIN"))
    refused = sasl_authenticate(call, SaslAuthenticateRequest(auth_bytes=plain("bob", "no")))
    assert (refused.error_code, refused.auth_bytes, refused.session_lifetime_ms) == (FAILED, b"", 0)


def test_where_nobody_has_to_prove_anything_sasl_is_illegal() -> None:
    """This is so with Kafka's listeners without SASL."""
    assert sasl_handshake(_call(None, 1), SaslHandshakeRequest()).error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert sasl_authenticate(_call(None, 1), SaslAuthenticateRequest()).error_code == ErrorCode.ILLEGAL_SASL_STATE


def test_handshake_of_version_0_goes_on_with_bare_tokens(users: Users) -> None:
    """The handler passes the version on."""
    session = SaslSession(users)
    sasl_handshake(_call(session, 0), SaslHandshakeRequest(mechanism="PLAIN"))
    assert session.takes_raw_tokens


def test_the_challenge_is_base64_of_a_salt(users: Users) -> None:
    """Clients of any kind can then read it."""
    session = SaslSession(users)
    session.handshake("SCRAM-SHA-256")
    client = ScramClient("SCRAM-SHA-256", "bob", "other")
    parts = session.authenticate(client.first())[2].decode().split(",")
    assert [part[:2] for part in parts] == ["r=", "s=", "i="]
    assert len(base64.b64decode(parts[1][2:], validate=True)) == 16
