"""Names of topics, folders and files."""

from __future__ import annotations

import uuid
from typing import Final

from segmentlog.errors import InvalidConfig, InvalidTopicName

FORMAT_VERSION: Final = 2
"""Of a store and of a topic, as their files say it: what this version writes.

1    topics go by their names
2    topics have ids, and the records of the internal topics name topics by them
"""
READABLE_FORMATS: Final = (1, 2)
"""Opening a store of an older one for writing makes it one of the newest; see `segmentlog.topics.topic_admin`."""

STORE_FILE: Final = "store.json"
TOPIC_FILE: Final = "topic.json"
CHECKPOINT_FILE: Final = "checkpoint"
STATE_FILE: Final = "state"
LOCK_FILE: Final = "lock"
CLEANER_FILE: Final = "cleaner"
"""Locked by whoever retains or compacts the partition; holds what the last pass did."""
PRODUCERS_FILE: Final = "producers"
"""What was known of every producer when the log was last closed, if that takes long to find out: a cache."""
GRANT_FILE: Final = "grant"
"""How far offsets may be handed out, where a store is shipped to an object store; see `format.grant`."""
QUARANTINE_FOLDER: Final = "quarantine"

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
ABORTED_SUFFIX: Final = ".txnindex"
"""Of a sealed segment: the transactions whose abort is told in it."""
SNAPSHOT_SUFFIX: Final = ".snapshot"
"""What was known of every producer when the segment began."""
REMOTE_SUFFIX: Final = ".remote"
"""Of a sealed segment whose bytes lie in an object store alone: where; see `format.stub`."""
CACHE_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)
"""Of files that are made from a segment's `.log`, and go when it is replaced."""
SEGMENT_SUFFIXES: Final = (LOG_SUFFIX, *CACHE_SUFFIXES, SNAPSHOT_SUFFIX, REMOTE_SUFFIX)
"""Of all files of a segment, in the order in which they are removed: no log stands there without its stub."""
DELETED_SUFFIX: Final = ".deleted"
TEMPORARY_SUFFIX: Final = ".tmp"
CLEANED_SUFFIX: Final = ".cleaned"
"""Of a compacted copy that is being written: it does not count."""
SWAP_SUFFIX: Final = ".swap"
"""Of a compacted copy that is whole and durable: it stands for every segment of its offsets."""

INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state"})

MAX_NAME_LENGTH: Final = 249
MAX_PARTITIONS: Final = 100_000
"""Of a topic. A file that claims more is damaged: nobody should go through that many folders."""

_FILE_NAME_MAX: Final = 255
_PATH_PARTS_MAX: Final = 16
_LEGAL: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_OFFSET_DIGITS: Final = 20
_OFFSET_END: Final = 2**63

HIDDEN: Final = "@"
"""Marks a folder of the store that is no topic (one being made or deleted): no topic name may hold it."""


ADMINISTRATION_FILE: Final = "@administration"
"""Of the store: locked by whoever makes, alters, renames or deletes a topic. Holds nothing."""
MAKING_PREFIX: Final = "@making-"
DELETED_PREFIX: Final = "@deleted-"
ALTERING_PREFIX: Final = "@altering-"
"""Of folders and files that are there for a moment, and are swept when their process was killed in it."""
PRODUCERS_FOLDER: Final = "@producers"
"""Of the store: a folder for each producer with a name."""
GROUPS_FOLDER: Final = "@groups"
"""Of the store: a folder for each consumer group that has members, or had."""
CONFIGS_FILE: Final = "@configs"
"""In it: what a server's groups are configured with."""
SCHEMAS_FILE: Final = "@schemas"
"""Of the store: the highest id that a schema was ever given, whatever became of the schema."""
PRODUCER_IDS_FILE: Final = "@producer-ids"
"""Of the store: the secret by which a server recognises the producer ids that it assigned."""
SHIPPED_FILES: Final = (f"{GROUPS_FOLDER}/{CONFIGS_FILE}", SCHEMAS_FILE, PRODUCER_IDS_FILE)
"""Of the store itself, beside its topics, what is shipped with them."""
STAGING_FOLDER: Final = "@staging"
"""Of the store: batches that jobs with many workers have written, and not published yet."""
SERVER_FILE: Final = "@server"
"""Of the store: locked by the server that has it, and says where that listens."""
USERS_FILE: Final = "@users.json"
"""Of the store: who may come in over Kafka's protocol, where no other file is named."""
ACLS_FILE: Final = "@acls"
"""Of the store: what they may do, likewise."""
RESTORING_FILE: Final = "@restoring"
"""Of a folder that is to be a store once all of it was brought from an object store."""
REPLICA_FILE: Final = "@replica"
"""Of a store that is a replica: of what. Locked by the process that keeps it up; others read it only."""
REPLICA_STATUS_FILE: Final = "@replica-status"
"""How far that is."""
SHIP_FILE: Final = "@ship"
"""Of the store: where it is shipped to, and as whom; see `segmentlog.objects`."""
UPLOADS_FILE: Final = "@uploads"
"""Of the store: large segments that are being uploaded in parts, and which of these lie there."""
FILE_LOCK_SUFFIX: Final = ".lock"
"""Behind the name of a file that people change as well: of the one that is locked by whoever does. Holds nothing."""
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SCHEMAS_TOPIC: Final = "_schemas"
"""Where other registries keep theirs as well: a topic like any other, so that it can be copied in and out."""

_QUOTABLE_MAX_BYTES: Final = 2**15 - 1
"""As long as a string may be in Kafka's protocol, where groups and transactional ids come from."""
_QUOTED_MAX: Final = 150


def folder_name_of(name: object, what: str) -> str:
    """The file name that stands for the name of a group, a producer, a job: what no file name should hold is ``%XX``.

    A long one is cut, and told from others by a hash. Raises `InvalidConfig`, which says ``what`` it is
    the name of, for what is none: 1 to 32,767 bytes as UTF-8 writes it.
    """
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    except UnicodeEncodeError:
        raise InvalidConfig(what, name, "a name that UTF-8 can write") from None
    if not 1 <= len(encoded) <= _QUOTABLE_MAX_BYTES:
        raise InvalidConfig(what, name, f"a name of 1 to {_QUOTABLE_MAX_BYTES:,} bytes as UTF-8 writes it")
    seen = encoded[: _QUOTED_MAX + 1]  # what follows is in the hash alone
    quoted = "".join(chr(byte) if chr(byte) in _LEGAL else f"%{byte:02X}" for byte in seen)
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > _QUOTED_MAX:  # "@" is always quoted: no other name looks like that
        from hashlib import blake2b  # seldom needed

        quoted = f"{quoted[:_QUOTED_MAX]}@{blake2b(encoded, digest_size=16).hexdigest()}"
    return quoted


def check_topic_name(name: object, *, internal: bool = False) -> str:
    """The name, if Kafka's rule allows it. Raises `InvalidTopicName`.

    1 to 249 of ``[a-zA-Z0-9._-]``, not ``.`` or ``..``. So no name leaves the store's folder.
    The names of `INTERNAL_TOPICS` are the store's own: they are names only with ``internal``.
    """
    if not isinstance(name, str):
        raise InvalidTopicName(name, f"a name is a str, not {type(name).__name__}")
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidTopicName(name, f"a name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}")
    if name in (".", ".."):
        raise InvalidTopicName(name, "'.' and '..' are not names")
    if illegal := sorted(set(name) - _LEGAL):
        raise InvalidTopicName(name, f"letters, digits, '.', '_' and '-' only; found {''.join(illegal)!r}")
    if name == STORE_FILE:
        raise InvalidTopicName(name, "the store keeps a file of that name")
    if name in INTERNAL_TOPICS and not internal:
        raise InvalidTopicName(name, "the topic of that name is internal: the store keeps its own records in it")
    return name


def check_relative_path(name: str) -> str:
    """Why ``name`` is not to be taken from a file as the path of another one below a folder; empty when it is.

    One or more plain names with ``/`` between them. None begins with ``.`` or ``_``: those are ours, or hidden.
    """
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it leads out of the folder"
    if not name.isprintable():
        return "it holds characters that no such name has"
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "it holds characters that no such name has"
    if len(parts) > _PATH_PARTS_MAX or any(len(part) > _FILE_NAME_MAX for part in parts):
        return "it is longer than any such name"
    if b".." in parts:
        return "it leads out of the folder"
    if any(not part or part.startswith((b".", b"_")) for part in parts):
        return "it is no plain name of a file"
    return ""


def new_topic_id() -> str:
    """A UUID that no other topic has."""
    return str(uuid.uuid4())


def topic_id_of_name(store_id: str, name: str) -> str:
    """The id of a topic that was made when topics had none: the same whoever asks, before the upgrade and after it."""
    text = f"segmentlog:{store_id}:{name}".encode(errors="backslashreplace").decode()
    return str(uuid.uuid5(uuid.NAMESPACE_OID, text))


def is_topic_id(text: object) -> bool:
    """Whether it is a UUID, spelled as `new_topic_id` spells it."""
    try:
        return isinstance(text, str) and str(uuid.UUID(text)) == text
    except ValueError:
        return False


def segment_name(base_offset: int) -> str:
    """The stem that the files of a segment share: its base offset in 20 digits."""
    return f"{base_offset:0{_OFFSET_DIGITS}d}"


def parse_segment_name(file_name: str) -> int | None:
    """The base offset in the name of a ``.log`` file; None for any other file."""
    stem = file_name[:_OFFSET_DIGITS]
    if len(file_name) == _OFFSET_DIGITS + len(LOG_SUFFIX) and file_name.endswith(LOG_SUFFIX) and stem.isdecimal():
        return base_offset if stem.isascii() and (base_offset := int(stem)) < _OFFSET_END else None
    return None


def copy_name(base_offset: int, end_offset: int, suffix: str) -> str:
    """Name of a compacted copy of the segments that hold ``[base_offset, end_offset)``."""
    return f"{segment_name(base_offset)}-{segment_name(end_offset)}{suffix}"


def parse_copy_name(file_name: str) -> tuple[int, int] | None:
    """The offsets in the name of a compacted copy, ``.cleaned`` or ``.swap``; None for any other file."""
    stem, dot, suffix = file_name.partition(".")
    first, dash, last = stem.partition("-")
    if dot + suffix not in (CLEANED_SUFFIX, SWAP_SUFFIX) or not dash:
        return None
    offsets = parse_segment_name(first + LOG_SUFFIX), parse_segment_name(last + LOG_SUFFIX)
    if offsets[0] is None or offsets[1] is None or offsets[0] >= offsets[1]:
        return None
    return offsets[0], offsets[1]


def deleted_name(base_offset: int, now_ms: int) -> str:
    """Name under which a segment's file waits for its deletion."""
    return f"{segment_name(base_offset)}.{now_ms}{DELETED_SUFFIX}"


def deleted_since_ms(file_name: str) -> int:
    """When a file was put aside, as its name says; 0 when it does not."""
    number = file_name.removesuffix(DELETED_SUFFIX).rpartition(".")[2]
    return int(number) if number.isascii() and number.isdecimal() else 0
