"""Users file: names and credentials. It contains no passwords: a reader of the file can only guess them.

JSON, UTF-8, readable by its owner only:

    {"format": 1,
     "secret": "...",                     random; the challenges of unknown users are derived from it
     "users": {
       "ann": {
         "SCRAM-SHA-256": {"salt": "...", "stored_key": "...", "server_key": "...", "iterations": 16384},
         "SCRAM-SHA-512": {...}}}}

Bytes are base64. The keys are those of RFC 5802: with ``salted = PBKDF2(password, salt, iterations)``, the stored key
is ``H(HMAC(salted, "Client Key"))`` and the server key ``HMAC(salted, "Server Key")``. They also verify PLAIN.
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
"""Name of the hash of each mechanism."""
ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 1_000_000
"""Largest number of iterations. kafka-python rejects more, and a client computes all of them for each connection."""
DEFAULT_ITERATIONS: Final = 16_384
"""Kafka's maximum. A login takes 4 ms, and so does each guess of a password."""
NAME_MAX: Final = 255
_SALT_BYTES: Final = 16
_SALT_BYTES_MIN: Final = 12
_FORMAT: Final = 1
_RESERVED: Final = frozenset(("*", "ANONYMOUS"))


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data that a server stores for a password and a mechanism."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:  # without the keys: it may get into a traceback
        return f"Credential(iterations={self.iterations})"


class _UsersDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    secret: bytes
    users: dict[str, dict[str, Credential]]

    def __repr__(self) -> str:
        return f"_UsersDocument({len(self.users)} users)"


_document_decoder = msgspec.json.Decoder(_UsersDocument)


class User(NamedTuple):
    """Public information about a user."""

    name: str
    mechanisms: tuple[str, ...]
    iterations: int


def derive(mechanism: str, password: str, salt: bytes, iterations: int) -> Credential:
    """Compute the credential of a password. This takes milliseconds, and does not hold the GIL."""
    algorithm = HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode("utf-8", "surrogatepass"), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    stored_key = hashlib.new(algorithm, client_key).digest()
    return Credential(salt, stored_key, hmac.digest(salted, b"Server Key", algorithm), iterations)


class Users:
    """Users of a file, reloaded when it changes.

    Thread-safe. The constructor raises `SecurityFileError` and OSError.
    """

    def __init__(self, path: str, *, fs: FileSystem | None = None) -> None:
        self.path = path
        fs = fs or FileSystem()
        try:
            self._file = WatchedFile(
                path, lambda data: _LoadedUsers(_decode(path, data)), _LoadedUsers.changes_to, fs=fs
            )
        except FileNotFoundError:
            why = "the file does not exist; 'segmentlog users add NAME --users FILE' creates it"
            raise SecurityFileError(path, why) from None
        if fs.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning(
                "%s: other users of this machine can read the file, and then guess passwords; run chmod 600", path
            )

    def reload(self) -> None:
        """Reload the file now, instead of within half a second."""
        self._file.reload()

    def version(self) -> object:
        """Return an object that is the same while the contents of the file are the same."""
        return self._file.current()

    def challenge(self, name: str, mechanism: str) -> tuple[Credential, bool]:
        """Return (credential for a challenge, whether the user exists).

        For an unknown user the credential is invented. It is the same each time, and no password matches it.
        """
        return self._file.current().challenge(name, mechanism)

    def verify(self, name: str, password: str) -> bool:
        """Return whether ``password`` is that of the user. Takes the same time for an unknown user."""
        known = self._file.current()
        mechanism = known.mechanism_for(name)
        credential, is_known = known.challenge(name, mechanism)
        found = derive(mechanism, password, credential.salt, credential.iterations)
        return hmac.compare_digest(found.stored_key, credential.stored_key) & is_known


class _LoadedUsers:
    """Contents of a users file."""

    def __init__(self, document: _UsersDocument) -> None:
        self._users = document.users
        self._secret = document.secret
        self._iterations = {mechanism: self._usual_iterations(mechanism) for mechanism in HASHES}

    def _usual_iterations(self, mechanism: str) -> int:
        """Return the number of iterations for unknown users.

        It is the most frequent number in the file. So the number does not reveal whether a user exists.
        """
        counts = Counter(found[mechanism].iterations for found in self._users.values() if mechanism in found)
        return max(counts, key=lambda count: (counts[count], count), default=DEFAULT_ITERATIONS)

    def changes_to(self, now: _LoadedUsers) -> str:
        """Return a text with the number of users now, and the numbers of added, removed and changed users; no names."""
        common = self._users.keys() & now._users.keys()
        return (
            f"{len(now._users):,} users; {len(now._users.keys() - common):,} added,"
            f" {len(self._users.keys() - common):,} removed,"
            f" {sum(self._users[name] != now._users[name] for name in common):,} with another password"
        )

    def mechanism_for(self, name: str) -> str:
        """Return the mechanism whose credential verifies a plain password."""
        return next((mechanism for mechanism in HASHES if mechanism in self._users.get(name, HASHES)), "SCRAM-SHA-256")

    def challenge(self, name: str, mechanism: str) -> tuple[Credential, bool]:
        # Derive a made-up credential for known users, too, so that known and unknown users take the same time.
        invented = self._invented_credential(name, mechanism)
        found = self._users.get(name, {}).get(mechanism)
        return (invented, False) if found is None else (found, True)

    def _invented_credential(self, name: str, mechanism: str) -> Credential:
        asked = f"{mechanism}\0{name}".encode("utf-8", "surrogatepass")
        salt, stored_key, server_key = (
            hmac.digest(self._secret, what + asked, HASHES[mechanism]) for what in (b"salt\0", b"stored\0", b"server\0")
        )
        return Credential(salt[:_SALT_BYTES], stored_key, server_key, self._iterations[mechanism])


def add_user(
    path: str, name: str, password: str, *, iterations: int = DEFAULT_ITERATIONS, fs: FileSystem | None = None
) -> bool:
    """Add a user or change a user's password. Return whether the user is new.

    Running servers apply the change within a second. Create the file if it does not exist. Raise `InvalidUser`,
    `SecurityFileError` and OSError.
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
    """Remove a user, and return whether it existed. Its connections stay open. Raise the errors of `add_user`."""

    def remove(before: bytes | None) -> tuple[bytes | None, bool]:
        if before is None:
            raise FileNotFoundError(2, os.strerror(2), path)
        document = _decode(path, before)
        if name not in document.users:
            return None, False
        users = {other: found for other, found in document.users.items() if other != name}
        return _encode(msgspec.structs.replace(document, users=users)), True

    if not (fs or FileSystem()).exists(path):  # before a lock file is created
        raise SecurityFileError(path, f"the file does not exist, so user {name!r} cannot be removed")
    return change_file(path, remove, mode=PRIVATE, fs=fs)


def list_users(path: str, *, fs: FileSystem | None = None) -> list[User]:
    """Return the users of a file in order of their names. Raise `SecurityFileError` and OSError."""
    try:
        document = _decode(path, read_file(fs or FileSystem(), path))
    except FileNotFoundError:
        raise SecurityFileError(path, "the file does not exist; 'segmentlog users add NAME' creates it") from None
    return [
        User(name, tuple(found), min(credential.iterations for credential in found.values()))
        for name, found in sorted(document.users.items())
    ]


def check_name(name: str) -> None:
    """Raise `InvalidUser` unless ``name`` is a valid user name."""
    if not 1 <= len(name) <= NAME_MAX or name in _RESERVED or not is_prepared(name):
        raise InvalidUser(
            f"{name!r} is not a valid user name: use 1 to {NAME_MAX} characters that SASLprep leaves unchanged;"
            f" {' and '.join(sorted(_RESERVED))} are reserved"
        )


def check_password(password: str, iterations: int) -> None:
    """Raise `InvalidUser`, without the password, if password or iterations are invalid."""
    if not password:
        raise InvalidUser("the password is empty")
    if not is_prepared(password):  # the message must not quote the password
        raise InvalidUser(
            "the password contains characters that clients encode differently (SASLprep changes or forbids them); use"
            " letters, digits and punctuation"
        )
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidUser(f"{iterations} iterations; use {ITERATIONS_MIN} to {ITERATIONS_MAX}")


def _encode(document: _UsersDocument) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _decode(path: str, data: bytes) -> _UsersDocument:
    """Decode a users file. Raise `SecurityFileError`, which names the position of a fault, but quotes no content."""
    try:
        document = _document_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # `UnicodeDecodeError` quotes the contents.
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise SecurityFileError(path, f"not a users file: {why}") from None
    if document.format != _FORMAT:
        raise SecurityFileError(path, f"it has format {document.format}; this version supports format {_FORMAT}")
    if len(document.secret) < _SALT_BYTES:
        raise SecurityFileError(path, f"its secret has fewer than {_SALT_BYTES} bytes")
    for name, found in document.users.items():
        if not found:
            raise SecurityFileError(path, f"user {name!r} has no credentials")
        for mechanism, credential in found.items():
            if mechanism not in HASHES:
                raise SecurityFileError(path, f"user {name!r}: {mechanism!r} is not one of {', '.join(HASHES)}")
            size = hashlib.new(HASHES[mechanism]).digest_size
            if len(credential.stored_key) != size or len(credential.server_key) != size:
                raise SecurityFileError(path, f"user {name!r}: the keys of {mechanism} must have {size} bytes")
            if len(credential.salt) < _SALT_BYTES_MIN:
                raise SecurityFileError(path, f"user {name!r}: the salt must have at least {_SALT_BYTES_MIN} bytes")
            if not ITERATIONS_MIN <= credential.iterations <= ITERATIONS_MAX:
                raise SecurityFileError(path, f"user {name!r}: iterations must be {ITERATIONS_MIN} to {ITERATIONS_MAX}")
    return document
