"""Names of topics, folders and files, and the rules for them."""

from __future__ import annotations

import uuid
from typing import Final

from segmentlog.errors import InvalidConfig, InvalidTopicName

FORMAT_VERSION: Final = 2
"""The format version of stores and topics that this version writes into their files.

1    topics are identified by their names
2    topics have ids, and the records of the internal topics identify topics by their ids
"""
READABLE_FORMATS: Final = (1, 2)
"""Opening a store of an older format for writing upgrades it; see `segmentlog.topics.topic_admin`."""

STORE_FILE: Final = "store.json"
TOPIC_FILE: Final = "topic.json"
CHECKPOINT_FILE: Final = "checkpoint"
STATE_FILE: Final = "state"
LOCK_FILE: Final = "lock"
CLEANER_FILE: Final = "cleaner"
"""Locked by the process that applies retention or compacts the partition. Contains the result of the last pass."""
PRODUCERS_FILE: Final = "producers"
"""State of every producer when the log was last closed: a cache, written only if rebuilding it takes long."""
GRANT_FILE: Final = "grant"
"""The offset up to which appends may assign offsets in a store that is uploaded; see `format.grant`."""
QUARANTINE_FOLDER: Final = "quarantine"

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
ABORTED_SUFFIX: Final = ".txnindex"
"""The transactions whose abort marker a sealed segment contains."""
SNAPSHOT_SUFFIX: Final = ".snapshot"
"""State of every producer when the segment began."""
REMOTE_SUFFIX: Final = ".remote"
"""Names the object of a sealed segment that is stored only in the object store; see `format.stub`."""
CACHE_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)
"""Files that are built from a segment's `.log`, and deleted when it is replaced."""
SEGMENT_SUFFIXES: Final = (LOG_SUFFIX, *CACHE_SUFFIXES, SNAPSHOT_SUFFIX, REMOTE_SUFFIX)
"""All files of a segment in the order of deletion: a `.log` must never exist without its `.remote`."""
DELETED_SUFFIX: Final = ".deleted"
TEMPORARY_SUFFIX: Final = ".tmp"
CLEANED_SUFFIX: Final = ".cleaned"
"""A compacted copy that is being written. Readers and recovery ignore it."""
SWAP_SUFFIX: Final = ".swap"
"""A compacted copy that is complete and durable. It replaces every segment of its offsets."""

INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state"})

MAX_NAME_LENGTH: Final = 249
MAX_PARTITIONS: Final = 100_000
"""Largest number of partitions of a topic. A file that claims more is damaged: no process should scan that many
folders."""

_FILE_NAME_MAX: Final = 255
_PATH_PARTS_MAX: Final = 16
_LEGAL: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_OFFSET_DIGITS: Final = 20
_OFFSET_END: Final = 2**63

HIDDEN: Final = "@"
"""First character of folders of the store that are not topics. A topic name must not contain it."""


ADMINISTRATION_FILE: Final = "@administration"
"""File of the store, locked by the process that creates, alters, renames or deletes a topic. Empty."""
MAKING_PREFIX: Final = "@making-"
DELETED_PREFIX: Final = "@deleted-"
ALTERING_PREFIX: Final = "@altering-"
"""Prefix of temporary folders and files. A later process deletes those that a killed process left."""
PRODUCERS_FOLDER: Final = "@producers"
"""Folder of the store with a folder for each named producer."""
GROUPS_FOLDER: Final = "@groups"
"""Folder of the store with a folder for each consumer group that has or had members."""
CONFIGS_FILE: Final = "@configs"
"""In `GROUPS_FOLDER`: the configuration of a server's groups."""
SCHEMAS_FILE: Final = "@schemas"
"""File of the store with the highest id that was ever assigned to a schema, even if that schema was deleted."""
PRODUCER_IDS_FILE: Final = "@producer-ids"
"""File of the store with the secret with which a server recognises the producer ids that it assigned."""
SHIPPED_FILES: Final = (f"{GROUPS_FOLDER}/{CONFIGS_FILE}", SCHEMAS_FILE, PRODUCER_IDS_FILE)
"""Files of the store itself that are uploaded together with its topics."""
STAGING_FOLDER: Final = "@staging"
"""Folder of the store with the batches that the workers of a job have written and not yet published."""
SERVER_FILE: Final = "@server"
"""File of the store, locked by the server of the store. Contains the addresses that it listens on."""
USERS_FILE: Final = "@users.json"
"""File of the store with the users that may log in over Kafka's protocol, unless the server is given another file."""
ACLS_FILE: Final = "@acls"
"""File of the store with the permissions of principals, unless the server is given another file."""
RESTORING_FILE: Final = "@restoring"
"""File of a folder that becomes a store when a restore has downloaded all of it from an object store."""
REPLICA_FILE: Final = "@replica"
"""File of a replica with the URL of its source. Locked by the process that follows the source; other processes only
read."""
REPLICA_STATUS_FILE: Final = "@replica-status"
"""File of a replica with its progress."""
STANDBY_STATUS_FILE: Final = "@standby-status"
"""File of a standby with its role, and with what it knows of the owner. The workers of its server read it."""
FORMER_FOLDER: Final = "@former"
"""Folder with what a former owner had stored and never shipped, by the epoch of its ownership."""
SHIP_FILE: Final = "@ship"
"""File of the store with the URL that it is uploaded to, and its identity as the owner; see `segmentlog.objects`."""
HAND_OVER_FILE: Final = "@hand-over"
"""File of the store with its planned hand-over to another machine; see `format.hand_over`. It stops appends."""
UPLOADS_FILE: Final = "@uploads"
"""File of the store with the segments that are being uploaded in parts, and which parts are stored in the object
store."""
FILE_LOCK_SUFFIX: Final = ".lock"
"""Suffix of the lock file of a file that people edit, too. A process locks it for each change. Empty."""
MACHINE_FILES: Final = frozenset(
    {SERVER_FILE, USERS_FILE, ACLS_FILE, STANDBY_STATUS_FILE, FORMER_FOLDER, "lost+found"}
    | {f"{name}{FILE_LOCK_SUFFIX}" for name in (USERS_FILE, ACLS_FILE)}
)
"""Names in a store's folder that belong to the machine, not to the store. A restore, a replica and a takeover keep
them."""
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SCHEMAS_TOPIC: Final = "_schemas"
"""The topic in which other schema registries store schemas, too: an ordinary topic that can be copied in and out."""

_QUOTABLE_MAX_BYTES: Final = 2**15 - 1
"""Longest string in Kafka's protocol, which group names and transactional ids come from."""
_QUOTED_MAX: Final = 150


def is_machine_file(name: str) -> bool:
    """Return whether a name in a store's folder belongs to the machine: `MACHINE_FILES`, and their temporary files.

    A process that is killed while it replaces a file leaves a temporary file.
    """
    return name in MACHINE_FILES or (
        name.endswith(TEMPORARY_SUFFIX) and any(name.startswith(f"{kept}.") for kept in MACHINE_FILES)
    )


def folder_name_of(name: object, what: str) -> str:
    """Return the file name for the name of a group, a producer or a job.

    A character that a file name should not contain becomes ``%XX``. A long name is truncated and gets a hash.
    Raise `InvalidConfig`, with ``what`` as the setting, unless the name has 1 to 32,767 bytes in UTF-8.
    """
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    except UnicodeEncodeError:
        raise InvalidConfig(what, name, "a name that UTF-8 can encode") from None
    if not 1 <= len(encoded) <= _QUOTABLE_MAX_BYTES:
        raise InvalidConfig(what, name, f"a name of 1 to {_QUOTABLE_MAX_BYTES:,} bytes in UTF-8")
    seen = encoded[: _QUOTED_MAX + 1]  # The name is truncated here; the hash also covers the rest.
    quoted = "".join(chr(byte) if chr(byte) in _LEGAL else f"%{byte:02X}" for byte in seen)
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > _QUOTED_MAX:  # "@" is always quoted, so this name cannot be equal to the quoted name of another
        from hashlib import blake2b  # imported late: rarely needed

        quoted = f"{quoted[:_QUOTED_MAX]}@{blake2b(encoded, digest_size=16).hexdigest()}"
    return quoted


def check_topic_name(name: object, *, internal: bool = False) -> str:
    """Return the name if Kafka's rule allows it. Raise `InvalidTopicName`.

    A name has 1 to 249 characters of ``[a-zA-Z0-9._-]``, and is not ``.`` or ``..``. So no name can point
    outside the store's folder. `INTERNAL_TOPICS` are reserved for the store: they need ``internal``.
    """
    if not isinstance(name, str):
        raise InvalidTopicName(name, f"a topic name must be a str, not {type(name).__name__}")
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidTopicName(name, f"a topic name must have 1 to {MAX_NAME_LENGTH} characters, not {len(name)}")
    if name in (".", ".."):
        raise InvalidTopicName(name, "'.' and '..' are not allowed")
    if illegal := sorted(set(name) - _LEGAL):
        raise InvalidTopicName(name, f"only letters, digits, '.', '_' and '-' are allowed; found {''.join(illegal)!r}")
    if name == STORE_FILE:
        raise InvalidTopicName(name, "the store has a file of that name")
    if name in INTERNAL_TOPICS and not internal:
        raise InvalidTopicName(name, "the name is reserved for an internal topic of the store")
    return name


def check_relative_path(name: str) -> str:
    """Return why ``name``, read from a file, must not be used as a path below a folder; "" if it may be used.

    A valid path is one or more file names joined with ``/``. No name begins with ``.`` or ``_``: such files are
    hidden, or the library's own.
    """
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it leads out of the folder"
    if not name.isprintable():
        return "it contains unprintable characters"
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "it contains characters that UTF-8 cannot encode"
    if len(parts) > _PATH_PARTS_MAX or any(len(part) > _FILE_NAME_MAX for part in parts):
        return f"it has more than {_PATH_PARTS_MAX} parts, or a part of more than {_FILE_NAME_MAX} bytes"
    if b".." in parts:
        return "it leads out of the folder"
    if any(not part or part.startswith((b".", b"_")) for part in parts):
        return "one of its parts is empty, or begins with '.' or '_'"
    return ""


def new_topic_id() -> str:
    """Return a new random UUID for a topic."""
    return str(uuid.uuid4())


def topic_id_of_name(store_id: str, name: str) -> str:
    """Return the id of a topic of format 1, which has none: the same in each process, before and after the upgrade."""
    text = f"segmentlog:{store_id}:{name}".encode(errors="backslashreplace").decode()
    return str(uuid.uuid5(uuid.NAMESPACE_OID, text))


def is_topic_id(text: object) -> bool:
    """Return whether ``text`` is a UUID in the spelling of `new_topic_id`."""
    try:
        return isinstance(text, str) and str(uuid.UUID(text)) == text
    except ValueError:
        return False


def segment_name(base_offset: int) -> str:
    """Return the common stem of the files of a segment: its base offset in 20 digits."""
    return f"{base_offset:0{_OFFSET_DIGITS}d}"


def parse_segment_name(file_name: str) -> int | None:
    """Return the base offset in the name of a ``.log`` file, or None for any other file."""
    stem = file_name[:_OFFSET_DIGITS]
    if len(file_name) == _OFFSET_DIGITS + len(LOG_SUFFIX) and file_name.endswith(LOG_SUFFIX) and stem.isdecimal():
        return base_offset if stem.isascii() and (base_offset := int(stem)) < _OFFSET_END else None
    return None


def copy_name(base_offset: int, end_offset: int, suffix: str) -> str:
    """Return the name of a compacted copy of the segments with the offsets ``[base_offset, end_offset)``."""
    return f"{segment_name(base_offset)}-{segment_name(end_offset)}{suffix}"


def parse_copy_name(file_name: str) -> tuple[int, int] | None:
    """Return the offsets in the name of a compacted copy, ``.cleaned`` or ``.swap``, or None for any other file."""
    stem, dot, suffix = file_name.partition(".")
    first, dash, last = stem.partition("-")
    if dot + suffix not in (CLEANED_SUFFIX, SWAP_SUFFIX) or not dash:
        return None
    offsets = parse_segment_name(first + LOG_SUFFIX), parse_segment_name(last + LOG_SUFFIX)
    if offsets[0] is None or offsets[1] is None or offsets[0] >= offsets[1]:
        return None
    return offsets[0], offsets[1]


def deleted_name(base_offset: int, now_ms: int) -> str:
    """Return the name of a segment's file that is marked for deletion at ``now_ms``."""
    return f"{segment_name(base_offset)}.{now_ms}{DELETED_SUFFIX}"


def deleted_since_ms(file_name: str) -> int:
    """Return the time in the name of a file that is marked for deletion; 0 if the name contains none."""
    number = file_name.removesuffix(DELETED_SUFFIX).rpartition(".")[2]
    return int(number) if number.isascii() and number.isdecimal() else 0
