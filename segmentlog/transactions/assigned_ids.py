"""Producer ids that a server assigns to clients without a transactional id, and how it recognises them.

An id contains the proof that the server assigned it. So the server needs no list of assigned ids:

    bits 61-62   10, as in all of `CLIENT_IDS`
    bits 20-60   number: each process counts up from a random start
    bits  0-19   tag: BLAKE2b of the number and of the client's principal, keyed with the store's secret

Any worker can check an id with the secret, also after a restart. The secret is in a file of the store. It is shipped
with the store, so after a restore or a takeover the new server recognises the ids that the old server assigned.

    @producer-ids   16 hex digits: XXH3-64 of the rest; a newline; JSON: {"secret": 64 hex digits}

The tag binds an id to a principal. A client that reads another client's id in a batch cannot use it. The chance that
a tag fits a second principal is one in a million for each pair, and repeated attempts do not raise it.

*Rejected:* a list of assigned ids, as it takes an fsync for each producer, and grows with every client that connects.
*Rejected:* 61 random bits beside a longer tag, as an id has 63 bits in all. Numbers that a process counts up never
collide within that process. Two processes collide only where their ranges overlap (10,000 ids each: once in 10^8).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from segmentlog.format.file_names import FILE_LOCK_SUFFIX, PRODUCER_IDS_FILE
from segmentlog.format.producer_snapshot import CLIENT_IDS, STORE_IDS
from segmentlog.storage import fork_safety
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_TAG_BITS: Final = 20
_NUMBER_BITS: Final = 41
_SECRET_BYTES: Final = 32
_HASH_BYTES: Final = 17
_CACHED_MAX: Final = 20_000
"""Maximum number of cached results. When it is reached, all are dropped: a client may send any number of ids."""


class _File(msgspec.Struct):
    secret: str


_decoder = msgspec.json.Decoder(_File)


class AssignedIds:
    """Assigns producer ids to the clients of a server, and checks them. Thread-safe, and safe with other processes."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._path = f"{topics.path}/{PRODUCER_IDS_FILE}"
        self._lock = ProcessLock(topics.fs, self._path + FILE_LOCK_SUFFIX)
        self._secret: bytes | None = None
        self._durable_secret: bytes | None = None
        """The secret, once it is certainly on disk. Before that, no id is assigned."""
        self._damaged: tuple[int, int, int] | None = None
        """Inode, size and time of modification of a file that was read and found damaged."""
        self._discard_parent_state()
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Choose a new start number in a forked child, so that parent and child assign different ids."""
        self._numbers: Iterator[int] = itertools.count(secrets.randbelow(1 << _NUMBER_BITS))
        self._cached: dict[tuple[int, str], bool] = {}

    def assign(self, principal: str) -> int:
        """Return an id for a producer of this principal.

        The first call in a store creates the secret, durably. Raises `ReadOnlyStore`, `DiskFull`, OSError.
        """
        secret = self._durable_secret or self._create_secret()
        number = next(self._numbers) % (1 << _NUMBER_BITS)
        return CLIENT_IDS.start | number << _TAG_BITS | _tag(secret, number, principal)

    def is_assigned(self, producer_id: int, principal: str) -> bool:
        """Return whether a server of this store assigned the id to this principal. Raises OSError."""
        result = self._cached.get((producer_id, principal))
        if result is None:
            result = self._check(producer_id, principal)
        return result

    def _check(self, producer_id: int, principal: str) -> bool:
        if producer_id not in CLIENT_IDS:
            return False
        secret = self._find_secret()
        if secret is None:
            return False  # not cached: another process may create the secret now
        number = (producer_id - CLIENT_IDS.start) >> _TAG_BITS
        is_assigned = producer_id & ((1 << _TAG_BITS) - 1) == _tag(secret, number, principal)
        if len(self._cached) >= _CACHED_MAX:
            self._cached.clear()
        self._cached[producer_id, principal] = is_assigned
        return is_assigned

    # ------------------------------------------------------------ the secret

    def _find_secret(self) -> bytes | None:
        if self._secret is None:
            try:
                found = self._topics.fs.stat(self._path)
                version = (found.st_ino, found.st_size, found.st_mtime_ns)
                if version == self._damaged:
                    return None
                data = read_file(self._topics.fs, self._path)
            except FileNotFoundError:
                return None
            self._secret = _decode(data)
            if self._secret is None:
                self._damaged = version
                logger.warning(
                    "%s is damaged: the server rejects all producer ids that it has assigned; restart the clients",
                    self._path,
                )
        return self._secret

    def _create_secret(self) -> bytes:
        self._topics.check_writable("assign producer ids")
        with self._lock.hold():  # another process that creates the secret holds the lock until it is on disk
            found = self._find_secret()
            if found is None:
                found = secrets.token_bytes(_SECRET_BYTES)
                text = msgspec.json.encode(_File(found.hex())) + b"\n"
                replace_file(self._topics.fs, self._path, b"%016x\n" % xxhash.xxh3_64_intdigest(text) + text)
            self._secret = self._durable_secret = found
            return found


def new_store_id() -> int:
    """Return a random id for a producer of the library. Clients of a server cannot use such an id."""
    return STORE_IDS.start + secrets.randbelow(len(STORE_IDS))


def _tag(secret: bytes, number: int, principal: str) -> int:
    data = number.to_bytes(8, "little") + principal.encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=secret).digest()
    return int.from_bytes(digest, "little") & ((1 << _TAG_BITS) - 1)


def _decode(data: bytes) -> bytes | None:
    text = data[_HASH_BYTES:]
    if data[:_HASH_BYTES] != b"%016x\n" % xxhash.xxh3_64_intdigest(text):
        return None
    try:
        secret = bytes.fromhex(_decoder.decode(text).secret)
    except (msgspec.DecodeError, ValueError):
        return None
    return secret if len(secret) == _SECRET_BYTES else None
