"""The users file: who may come in, and what proves it. No password is in it, nor to be got out of it but by guessing.

JSON, UTF-8, readable for its owner alone:

    {"format": 1,
     "secret": "...",                     random; what unknown users are challenged with is made of it
     "users": {
       "ann": {
         "SCRAM-SHA-256": {"salt": "...", "stored_key": "...", "server_key": "...", "iterations": 16384},
         "SCRAM-SHA-512": {...}}}}

Bytes are base64. The keys are those of RFC 5802: with ``salted = PBKDF2(password, salt, iterations)``, the stored key
is ``H(HMAC(salted, "Client Key"))`` and the server key ``HMAC(salted, "Server Key")``. PLAIN is verified by them, too.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections import Counter
from typing import Final, NamedTuple

import msgspec

from segmentlog.security.file_replacement import PRIVATE, change_file
from segmentlog.security.saslprep import is_prepared
from segmentlog.security.security_errors import InvalidUser, SecurityFileError
from segmentlog.security.watched_file import WatchedFile
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem

logger = logging.getLogger("segmentlog.server")

HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
"""By mechanism, the name of its hash."""
ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 1_000_000
"""Clients refuse more (kafka-python), and every one of them has to do it each time it connects."""
DEFAULT_ITERATIONS: Final = 16_384
"""As many as Kafka takes at the most; 4 ms for each log-in, and for each guess."""
NAME_MAX: Final = 255
_SALT_BYTES: Final = 16
_SALT_BYTES_MIN: Final = 12
_FORMAT: Final = 1
_RESERVED: Final = frozenset(("*", "ANONYMOUS"))


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server knows of a password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:  # it may get into a traceback
        return f"Credential(iterations={self.iterations})"


class _UsersDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    secret: bytes
    users: dict[str, dict[str, Credential]]

    def __repr__(self) -> str:
        return f"_Document({len(self.users)} users)"


class User(NamedTuple):
    """What may be shown of a user."""

    name: str
    mechanisms: tuple[str, ...]
    iterations: int


def derive(mechanism: str, password: str, salt: bytes, iterations: int) -> Credential:
    """The keys of a password. Takes its time, outside of Python's lock."""
    algorithm = HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode("utf-8", "surrogatepass"), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    stored_key = hashlib.new(algorithm, client_key).digest()
    return Credential(salt, stored_key, hmac.digest(salted, b"Server Key", algorithm), iterations)


class Users:
    """The users of a file, as they are there now. Thread-safe. Raises `SecurityFileError` and OSError when made."""

    def __init__(self, path: str, *, fs: FileSystem | None = None) -> None:
        self.path = path
        fs = fs or FileSystem()
        try:
            self._file = WatchedFile(
                path, lambda data: _LoadedUsers(_decode(path, data)), _LoadedUsers.changes_to, fs=fs
            )
        except FileNotFoundError:
            why = "there is no such file; 'segmentlog users add NAME --users FILE' makes it"
            raise SecurityFileError(path, why) from None
        if fs.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("%s: others may read it, and guess passwords by it: chmod 600", path)

    def reload(self) -> None:
        """Look at the file now, and not within the next half second."""
        self._file.reload()

    def version(self) -> object:
        """The same object as long as the file says the same."""
        return self._file.current()

    def challenge(self, name: str, mechanism: str) -> tuple[Credential, bool]:
        """(what to challenge somebody of this name with, whether there is such a user).

        For a name that nobody has it is made up, the same each time, and no password fits.
        """
        return self._file.current().challenge(name, mechanism)

    def verify(self, name: str, password: str) -> bool:
        """Whether it is the user's password. As slow for a name that nobody has."""
        known = self._file.current()
        mechanism = known.mechanism_for(name)
        credential, is_known = known.challenge(name, mechanism)
        found = derive(mechanism, password, credential.salt, credential.iterations)
        return hmac.compare_digest(found.stored_key, credential.stored_key) & is_known


class _LoadedUsers:
    """One state of the file."""

    def __init__(self, document: _UsersDocument) -> None:
        self._users = document.users
        self._secret = document.secret
        self._iterations = {mechanism: self._usual_iterations(mechanism) for mechanism in HASHES}

    def _usual_iterations(self, mechanism: str) -> int:
        """So many has somebody whom there is not: as most have, or that would tell him."""
        counts = Counter(found[mechanism].iterations for found in self._users.values() if mechanism in found)
        return max(counts, key=lambda count: (counts[count], count), default=DEFAULT_ITERATIONS)

    def changes_to(self, now: _LoadedUsers) -> str:
        """Say how many users there are now, and how many came, went and got another password. Names nobody."""
        there = self._users.keys() & now._users.keys()
        return (
            f"{len(now._users):,} users; {len(now._users.keys() - there):,} added,"
            f" {len(self._users.keys() - there):,} removed,"
            f" {sum(self._users[name] != now._users[name] for name in there):,} with another password"
        )

    def mechanism_for(self, name: str) -> str:
        """By which a password in the clear is verified."""
        return next((mechanism for mechanism in HASHES if mechanism in self._users.get(name, HASHES)), "SCRAM-SHA-256")

    def challenge(self, name: str, mechanism: str) -> tuple[Credential, bool]:
        # Made up in any case, so that it takes the same time.
        made_up = self._made_up(name, mechanism)
        found = self._users.get(name, {}).get(mechanism)
        return (made_up, False) if found is None else (found, True)

    def _made_up(self, name: str, mechanism: str) -> Credential:
        asked = f"{mechanism}\0{name}".encode("utf-8", "surrogatepass")
        salt, stored_key, server_key = (
            hmac.digest(self._secret, what + asked, HASHES[mechanism]) for what in (b"salt\0", b"stored\0", b"server\0")
        )
        return Credential(salt[:_SALT_BYTES], stored_key, server_key, self._iterations[mechanism])


def add_user(
    path: str, name: str, password: str, *, iterations: int = DEFAULT_ITERATIONS, fs: FileSystem | None = None
) -> bool:
    """Add a user, or give him another password; whether he is new. Servers that run take him in within a second.

    The file is made if it is not there. Raises `InvalidUser`, `SecurityFileError` and OSError.
    """
    check_name(name)
    check_password(password, iterations)
    made = {
        mechanism: derive(mechanism, password, secrets.token_bytes(_SALT_BYTES), iterations) for mechanism in HASHES
    }

    def add(before: bytes | None) -> tuple[bytes, bool]:
        document = _decode(path, before) if before else _UsersDocument(_FORMAT, secrets.token_bytes(32), {})
        users = {**document.users, name: made}
        return _encode(msgspec.structs.replace(document, users=users)), name not in document.users

    return change_file(path, add, mode=PRIVATE, fs=fs)


def remove_user(path: str, name: str, *, fs: FileSystem | None = None) -> bool:
    """Remove a user; whether there was one. He stays on connections that he has. Raises as `add_user` does."""

    def remove(before: bytes | None) -> tuple[bytes | None, bool]:
        if before is None:
            raise FileNotFoundError(2, os.strerror(2), path)
        document = _decode(path, before)
        if name not in document.users:
            return None, False
        users = {other: found for other, found in document.users.items() if other != name}
        return _encode(msgspec.structs.replace(document, users=users)), True

    if not (fs or FileSystem()).exists(path):  # or a lock would be left where nothing is
        raise SecurityFileError(path, "there is no such file, and so no user")
    return change_file(path, remove, mode=PRIVATE, fs=fs)


def list_users(path: str, *, fs: FileSystem | None = None) -> list[User]:
    """The users of a file by their names. Raises `SecurityFileError` and OSError."""
    try:
        document = _decode(path, read_file(fs or FileSystem(), path))
    except FileNotFoundError:
        raise SecurityFileError(path, "there is no such file; 'segmentlog users add NAME' makes it") from None
    return [
        User(name, tuple(found), min(credential.iterations for credential in found.values()))
        for name, found in sorted(document.users.items())
    ]


def check_name(name: str) -> None:
    """Raises `InvalidUser` for what is no name for a user."""
    if not 1 <= len(name) <= NAME_MAX or name in _RESERVED or not is_prepared(name):
        raise InvalidUser(
            f"{name!r} is no name for a user: 1 to {NAME_MAX} characters that SASLprep leaves as they are, and neither"
            f" {' nor '.join(sorted(_RESERVED))}"
        )


def check_password(password: str, iterations: int) -> None:
    """Raises `InvalidUser`, which does not repeat the password."""
    if not password:
        raise InvalidUser("the password is empty")
    if not is_prepared(password):  # and say nothing of it
        raise InvalidUser(
            "the password has characters that some clients send otherwise than others (SASLprep changes or forbids"
            " them): choose one of letters, digits and signs"
        )
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidUser(f"{iterations} iterations: from {ITERATIONS_MIN} to {ITERATIONS_MAX}")


def _encode(document: _UsersDocument) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _decode(path: str, data: bytes) -> _UsersDocument:
    """Raises `SecurityFileError`, which tells where something is wrong, and not what is there."""
    try:
        document = msgspec.json.decode(data, type=_UsersDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # What it says of a text holds what is there.
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise SecurityFileError(path, f"not a users file: {why}") from None
    if document.format != _FORMAT:
        raise SecurityFileError(path, f"it has format {document.format}, and this version knows {_FORMAT}")
    if len(document.secret) < _SALT_BYTES:
        raise SecurityFileError(path, f"its secret has less than {_SALT_BYTES} bytes")
    for name, found in document.users.items():
        if not found:
            raise SecurityFileError(path, f"user {name!r} has nothing that proves him")
        for mechanism, credential in found.items():
            if mechanism not in HASHES:
                raise SecurityFileError(path, f"user {name!r}: {mechanism!r} is none of {', '.join(HASHES)}")
            size = hashlib.new(HASHES[mechanism]).digest_size
            if len(credential.stored_key) != size or len(credential.server_key) != size:
                raise SecurityFileError(path, f"user {name!r}: the keys of {mechanism} have {size} bytes")
            if len(credential.salt) < _SALT_BYTES_MIN:
                raise SecurityFileError(path, f"user {name!r}: a salt has at least {_SALT_BYTES_MIN} bytes")
            if not ITERATIONS_MIN <= credential.iterations <= ITERATIONS_MAX:
                raise SecurityFileError(
                    path, f"user {name!r}: iterations are from {ITERATIONS_MIN} to {ITERATIONS_MAX}"
                )
    return document
