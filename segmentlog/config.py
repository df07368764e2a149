"""The topic configuration, with all its defaults. (Defaults of `segmentlog.open` are in `segmentlog.defaults`.)

This module has no side effects: it converts texts and numbers to frozen values. The topic config has Kafka's keys with
Kafka's meanings, and some additional keys. Keys are written with dots in files and on the command line, and with
underscores in Python.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast, get_args

from segmentlog.defaults import CLEANER_BUFFER_BYTES as CLEANER_BUFFER_BYTES
from segmentlog.errors import InvalidConfig
from segmentlog.format.batch_codecs import CODEC_NAMES, CODECS, Compression, compression
from segmentlog.quantities import (
    AS_RETENTION,
    INT64_MAX,
    MIB,
    UNLIMITED,
    UNLIMITED_MS,
    format_duration_ms,
    format_size,
    parse_count,
    parse_duration_ms,
    parse_size,
)

CLIENT_TIMESTAMP_AFTER_MAX_MS = 3_600_000
"""`message.timestamp.after.max.ms` for Kafka clients, in a topic that does not set it. Kafka's default."""

OFFSET_CEILING_STEP = 1_000_000
"""Number of offsets that one sync of the checkpoint reserves for appends."""


EXPIRES_HEADER = "expires-at-ms"
"""Name of the header with a record's expiry time: then compaction may drop the record. The value is decimal digits:
milliseconds since 1970."""

# --- fsync ----------------------------------------------------------------------------------------------

FsyncKind = Literal["always", "ms", "records", "bytes", "never"]
FSYNC_ACCEPTED = "always, everysec, never, <n>ms, <n>s, <n>records, <n>bytes or a size with its unit as in 1MiB"


@dataclass(frozen=True, slots=True)
class FsyncPolicy:
    """When appended records are synced to the disk. This decides what a power cut can lose.

    The death of a process, including kill -9, loses no acknowledged record under any policy.

    - `always`: an append returns once its records are on disk; concurrent appends share one fsync. No
      acknowledged record can be lost.
    - `ms`: a background flush at least every `amount` milliseconds (`everysec` is 1000). Records of the
      last `amount` milliseconds, and those appended during a running flush, can be lost.
    - `records`: a flush once `amount` records are unflushed. These, and those appended during the flush, can be lost.
      If a topic becomes idle, its last few records stay at risk.
    - `bytes`: like `records`, but `amount` is a number of stored bytes.
    - `never`: the operating system decides, usually after 5 to 30 seconds; sealing a segment syncs it, too. All
      records that were not written yet can be lost.

    With any policy, a single append can wait for the disk with `ack="durable"`.
    """

    kind: FsyncKind
    amount: int = 0
    """Milliseconds, records or bytes, depending on `kind`, from 1 to 2**31 - 1; 0 for always and never."""

    def __post_init__(self) -> None:
        low, high = (0, 0) if self.kind in ("always", "never") else (1, 2**31 - 1)
        if self.kind not in get_args(FsyncKind) or not low <= self.amount <= high:
            raise InvalidConfig("fsync", f"{self.amount}{self.kind}", FSYNC_ACCEPTED)

    @classmethod
    def parse(cls, text: object) -> Self:
        """Convert a text to a policy. A policy is returned unchanged. Raises InvalidConfig."""
        if isinstance(text, cls):
            return text
        word = text.strip().lower() if isinstance(text, str) else ""
        if word in ("always", "never"):
            return cls(cast(FsyncKind, word))
        if word == "everysec":
            return cls("ms", 1000)
        try:
            # A number without a unit is rejected, and so is a unit of one letter: 5m could be minutes or mebibytes.
            if word.endswith("records"):
                return cls("records", parse_count(word.removesuffix("records")))
            if word.endswith(("b", "bytes")):
                return cls("bytes", parse_size(word))
            if word.endswith("s"):
                return cls("ms", parse_duration_ms(word))
            if not isinstance(text, str | int):  # a timedelta
                return cls("ms", parse_duration_ms(text))
        except ValueError:  # also InvalidConfig of a part of the text: the error below shows the whole text
            pass
        raise InvalidConfig("fsync", text, FSYNC_ACCEPTED)

    def __str__(self) -> str:
        return f"{self.amount}{self.kind}" if self.amount else self.kind


# --- what a key of the topic config accepts ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of a key: how to parse and show its values, and which values it accepts."""

    parse: Callable[[object], Any]
    """Idempotent: a parsed value parses to itself. Raises ValueError, TypeError or LookupError."""
    show: Callable[[Any], str]
    accepted: str


_BOUNDED = object()
# For durations that must have a limit: a longer one is probably in the wrong unit.
_CENTURY_MS = 36_500 * 86_400_000


def _number(
    read: Callable[[object], int],
    show: Callable[[int], str],
    what: str,
    low: int,
    high: int,
    unlimited: object = _BOUNDED,
) -> _Kind:
    """Return the type of a key for whole numbers in [low, high], and for `unlimited` if that is given."""

    def parse(value: object) -> object:
        if value is None and unlimited is None:
            return None
        amount = read(value)
        if amount in (UNLIMITED, INT64_MAX) and unlimited is not _BOUNDED:
            return unlimited
        if not low <= amount <= high:
            raise ValueError(f"{amount} is out of range")
        return amount

    bounds = f"of at least {show(low)}" if high == INT64_MAX else f"from {show(low)} to {show(high)}"
    no_limit = "" if unlimited is _BOUNDED else ", or unlimited"
    return _Kind(parse, lambda value: "unlimited" if value is None else show(value), f"{what} {bounds}{no_limit}")


def _size(low: int, high: int, unlimited: object = _BOUNDED) -> _Kind:
    return _number(parse_size, lambda size: format_size(size, exact=True), "a size", low, high, unlimited)


def _duration(low: int, unlimited: object = _BOUNDED) -> _Kind:
    high = _CENTURY_MS if unlimited is _BOUNDED else INT64_MAX
    return _number(parse_duration_ms, format_duration_ms, "a time", low, high, unlimited)


def _with_reason(kind: _Kind, reason: str) -> _Kind:
    """Return a copy of ``kind`` whose error messages also contain the reason for its limits."""
    return _Kind(kind.parse, kind.show, f"{kind.accepted}: {reason}")


def _count(low: int, unlimited: object = _BOUNDED) -> _Kind:
    return _number(parse_count, str, "a whole number", low, 2**31 - 1, unlimited)


def _text(value: object) -> str:
    if not isinstance(value, str):  # str(None) would be the name of a compression type
        raise ValueError(f"{value!r} is not a text")
    return value.strip().lower()


def _choice(*names: str) -> _Kind:
    spelling = {name.lower(): name for name in names}

    def parse(value: object) -> str:
        return spelling[_text(value)]

    return _Kind(parse, str, f"{', '.join(names[:-1])} or {names[-1]}")


def _or_as_retention(kind: _Kind, key: str) -> _Kind:
    """Return a copy of ``kind`` that also accepts `AS_RETENTION`."""

    def parse(value: object) -> object:
        text = value.strip() if isinstance(value, str) else value
        is_same = not isinstance(text, bool) and text in (AS_RETENTION, str(AS_RETENTION))
        return AS_RETENTION if is_same else kind.parse(value)

    def show(value: Any) -> str:
        return str(AS_RETENTION) if value == AS_RETENTION else kind.show(value)

    return _Kind(parse, show, f"{kind.accepted}, or {AS_RETENTION}: that of {key}")


def _parse_compression_type(value: object) -> str:
    text = _text(value)
    if text not in _COMPRESSION_TYPES:
        raise ValueError(f"{text!r} is not a compression type")
    return _COMPRESSION_TYPES[text]


def _parse_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}[_text(value)]


def _parse_cleanup_policy(value: object) -> str:
    text = _text(value)
    if text in ("", _NO_POLICY):
        return ""
    words = {word.strip() for word in text.split(",")}
    if not words <= {"delete", "compact"}:
        raise ValueError(f"{value!r} is not a cleanup policy")
    return ",".join(sorted(words, reverse=True))


def _parse_ratio(value: object) -> float:
    if isinstance(value, bool):
        raise ValueError("a ratio is a number")
    ratio = float(cast(Any, value))
    if not 0.0 <= ratio <= 1.0:  # also false for NaN
        raise ValueError(f"{ratio} is out of range")
    return ratio


def _parse_level(value: object) -> int | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "default"):
        return None
    if isinstance(value, bool):
        raise ValueError("a level is a number")
    return int(value) if isinstance(value, str) else operator.index(cast(Any, value))  # zstd has negative levels


def _parse_clock_limit(value: object) -> int:
    """Parse a time limit. As in Kafka, these keys do not accept -1 for unlimited."""
    if isinstance(value, str) and value.strip().lower() == "unlimited":
        return UNLIMITED_MS
    limit_ms = parse_duration_ms(value)
    if not 0 <= limit_ms <= UNLIMITED_MS:
        raise ValueError(f"{limit_ms} is out of range")
    return limit_ms


def _parse_clock_limit_or_default(value: object) -> int | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "default"):
        return None
    return _parse_clock_limit(value)


_CLOCK_LIMIT = _Kind(_parse_clock_limit, format_duration_ms, "a time of at least 0ms, or unlimited")
_CLOCK_LIMIT_OR_DEFAULT = _Kind(
    _parse_clock_limit_or_default,
    lambda limit_ms: "default" if limit_ms is None else format_duration_ms(limit_ms),
    "a time of at least 0ms, unlimited, or default",
)
_LEVEL = _Kind(
    _parse_level, lambda level: "default" if level is None else str(level), "a level of the codec, or default"
)
_NO_POLICY = "none"
_CLEANUP_POLICY = _Kind(
    _parse_cleanup_policy,
    lambda policy: policy or _NO_POLICY,
    f"delete, compact, delete,compact or {_NO_POLICY}, which keeps records forever",
)
PRODUCER = "producer"
"""The `compression.type` that keeps the codec of each Kafka client's batch; Kafka's name for it."""
_COMPRESSION_TYPES = {name: name for name in (PRODUCER, *CODEC_NAMES)} | {"uncompressed": "none"}
_COMPRESSION_TYPE = _Kind(
    _parse_compression_type, str, f"{PRODUCER}, {', '.join(CODEC_NAMES[:-1])} or {CODEC_NAMES[-1]} (or uncompressed)"
)
_FLAG = _Kind(_parse_flag, lambda value: "true" if value else "false", "true or false")
_RATIO = _Kind(_parse_ratio, str, "a number from 0 to 1")
_FSYNC = _Kind(FsyncPolicy.parse, str, FSYNC_ACCEPTED)

T = TypeVar("T")


def _key(default: T, kind: _Kind, meaning: str) -> T:
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


# --- the topic config ---------------------------------------------------------------------------------------

CleanupPolicy = Literal["", "delete", "compact", "delete,compact"]
TimestampType = Literal["CreateTime", "LogAppendTime"]
CompressionType = Literal["producer", "lz4", "zstd", "gzip", "snappy", "none"]

# Positions in a segment are u32, and a batch larger than a segment gets its own segment.
_SEGMENT_BYTES_MAX = 2**31 - 1
# With a smaller limit, every batch would get its own segment.
_SEGMENT_BYTES_MIN = 256
_MESSAGE_BYTES_MAX = 512 * MIB
# Kafka's value: the largest array that Java can allocate.
_DECOMPRESSED_BYTES_MAX = 2**31 - 9
_LEVELS_IN_WORDS = "; ".join(
    "{}: {} to {}, default {}".format(codec.name, *codec.levels) for codec in CODECS if codec.levels is not None
)


class ConfigLine(NamedTuple):
    """One key of a topic config with its value and meaning, for display."""

    key: str
    value: str
    is_default: bool
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """How a topic rolls, retains, compacts, compresses and syncs its records. Raises InvalidConfig.

    Units are in the names. "No limit" is Kafka's value in Kafka's keys: -1 (`retention_*`) or UNLIMITED_MS. It is None
    in segmentlog's own keys. The number of partitions is stored separately.
    """

    segment_bytes: int = _key(
        64 * MIB, _size(_SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX), "seal a segment before it becomes larger than this"
    )
    segment_ms: int = _key(
        7 * 86_400_000,
        _duration(1, UNLIMITED_MS),
        "seal a segment when its first record is this old, whatever its size",
    )
    segment_records: int | None = _key(
        None,
        _count(1, unlimited=None),
        "seal a segment at this number of records (page size in kafkaesque, a log in Redis)",
    )
    index_interval_bytes: int = _key(
        4096, _size(0, 2**31 - 1), "distance of index entries: smaller finds faster, larger saves space"
    )
    retention_ms: int = _key(
        7 * 86_400_000, _duration(0, UNLIMITED), "delete a sealed segment when its newest record is this old"
    )
    retention_bytes: int = _key(
        UNLIMITED,
        _size(0, INT64_MAX, UNLIMITED),
        "delete the oldest segments while a partition is larger than this",
    )
    # 0 is not accepted: some people take it for "no limit", others for "keep nothing".
    retention_segments: int | None = _key(
        None, _count(1, unlimited=None), "number of sealed segments that a partition keeps"
    )
    retention_closed_ms: int | None = _key(
        None, _duration(1, unlimited=None), "delete a segment this long after it was sealed"
    )
    cleanup_policy: CleanupPolicy = _key(
        "delete",
        _CLEANUP_POLICY,
        "delete old segments, compact to the last record of each key, both, or neither (none)",
    )
    min_cleanable_dirty_ratio: float = _key(0.5, _RATIO, "compaction waits until this part of the log is dirty")
    delete_retention_ms: int = _key(
        86_400_000, _duration(0, UNLIMITED_MS), "how long compaction keeps a tombstone for readers"
    )
    min_compaction_lag_ms: int = _key(
        0, _duration(0, UNLIMITED_MS), "compaction does not remove a record before it is this old"
    )
    max_compaction_lag_ms: int = _key(
        UNLIMITED_MS, _duration(1, UNLIMITED_MS), "compact a record that is this old whatever the dirty ratio"
    )
    compaction_keep_last: int = _key(1, _count(1), "number of records of each key that compaction keeps")
    record_ttl_ms: int | None = _key(
        None, _duration(1, unlimited=None), "compaction drops a record this long after its timestamp"
    )
    max_message_bytes: int = _key(
        1_048_588,
        _with_reason(_size(1, _MESSAGE_BYTES_MAX), "each reader holds a whole batch in memory"),
        "largest batch before compression, so also the largest record",
    )
    max_decompressed_message_bytes: int = _key(
        _DECOMPRESSED_BYTES_MAX,
        _size(1, _DECOMPRESSED_BYTES_MAX),
        "largest record, decompressed, in a compressed batch of a Kafka client",
    )
    message_timestamp_type: TimestampType = _key(
        "CreateTime",
        _choice("CreateTime", "LogAppendTime"),
        "which clock sets a record's timestamp: the sender's or the log's",
    )
    message_timestamp_after_max_ms: int | None = _key(
        None,
        _CLOCK_LIMIT_OR_DEFAULT,
        "how far a record's timestamp may be after the clock; default: an hour for Kafka clients, no limit for"
        " the library",
    )
    message_timestamp_before_max_ms: int = _key(
        UNLIMITED_MS, _CLOCK_LIMIT, "how far a record's timestamp may be in the past"
    )
    compression_type: CompressionType = _key(
        "producer",
        _COMPRESSION_TYPE,
        "how batches are compressed; batches of Kafka clients are recompressed."
        f" producer: {CODECS[0].name}, and batches of Kafka clients are not changed",
    )
    compression_level: int | None = _key(
        None, _LEVEL, f"compression level, for codecs that have levels ({_LEVELS_IN_WORDS})"
    )
    file_delete_delay_ms: int = _key(
        60_000, _duration(0), "how long the file of a deleted segment is kept for readers that have it open"
    )
    producer_id_expiration_ms: int = _key(
        86_400_000, _duration(1), "how long an unnamed producer is remembered after its last append"
    )
    remote_storage_enable: bool = _key(
        False, _FLAG, "tiered storage: evict old segments from the local disk once the object store has them"
    )
    local_retention_ms: int = _key(
        AS_RETENTION,
        _or_as_retention(_duration(0, UNLIMITED), "retention.ms"),
        "with tiered storage: evict a segment when its newest record is this old",
    )
    local_retention_bytes: int = _key(
        AS_RETENTION,
        _or_as_retention(_size(0, INT64_MAX, UNLIMITED), "retention.bytes"),
        "with tiered storage: evict the oldest segments while the local ones are larger than this",
    )
    fsync: FsyncPolicy = _key(
        FsyncPolicy("ms", 1000), _FSYNC, "when records are synced to the disk, which decides what a power cut can lose"
    )

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind.parse(value))
            except (ValueError, TypeError, LookupError, OverflowError):
                raise InvalidConfig(_dotted(name), value, kind.accepted) from None
        try:
            compression(self.codec_name, self.compression_level)
        except ValueError as error:
            expected = f"a level that compression.type={self.compression_type} has, or default: {error}"
            raise InvalidConfig("compression.level", self.compression_level, expected) from None
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            most = format_duration_ms(self.max_compaction_lag_ms)
            raise InvalidConfig(
                "min.compaction.lag.ms",
                self.min_compaction_lag_ms,
                f"at most max.compaction.lag.ms, which is {most}",
            )
        if self.remote_storage_enable and self.deletes:  # as in Kafka: local data are part of all retained data
            for local_key, key in (
                ("local.retention.ms", "retention.ms"),
                ("local.retention.bytes", "retention.bytes"),
            ):
                local_limit, limit = (getattr(self, name.replace(".", "_")) for name in (local_key, key))
                if limit != UNLIMITED and (local_limit == UNLIMITED or local_limit > limit):
                    raise InvalidConfig(
                        local_key, local_limit, f"at most {key}, which is {limit}, or {AS_RETENTION} to use {key}"
                    )

    @property
    def effective_local_retention_ms(self) -> int:
        """The value of `local.retention.ms`, or of `retention.ms` if that applies; may be UNLIMITED."""
        return self.retention_ms if self.local_retention_ms == AS_RETENTION else self.local_retention_ms

    @property
    def effective_local_retention_bytes(self) -> int:
        """The value of `local.retention.bytes`, or of `retention.bytes` if that applies; may be UNLIMITED."""
        return self.retention_bytes if self.local_retention_bytes == AS_RETENTION else self.local_retention_bytes

    @property
    def kept_here_ms(self) -> int:
        """Former name of `effective_local_retention_ms`."""
        return self.effective_local_retention_ms

    @property
    def kept_here_bytes(self) -> int:
        """Former name of `effective_local_retention_bytes`."""
        return self.effective_local_retention_bytes

    @property
    def deletes(self) -> bool:
        """Whether retention deletes old segments."""
        return "delete" in self.cleanup_policy

    @property
    def codec_name(self) -> str:
        """The codec of batches that the library writes."""
        return CODECS[0].name if self.compression_type == PRODUCER else self.compression_type

    @property
    def compression(self) -> Compression:
        """Codec and level with which the library compresses batches."""
        return compression(self.codec_name, self.compression_level)

    def recompresses(self, codec: int) -> bool:
        """Return whether a Kafka client's batch with the codec number ``codec`` is recompressed."""
        return self.compression_type != PRODUCER and self.compression.codec.number != codec

    @property
    def compacts(self) -> bool:
        """Whether compaction removes all but the last records of each key."""
        return "compact" in self.cleanup_policy

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> Self:
        """Create a config from keys with dots or underscores, and values as numbers or as people write them.

        Raises InvalidConfig for an unknown key, a value out of range, or a key that is given twice.
        """
        return cls(**_by_field_name(settings))

    def replace(self, settings: Mapping[str, object]) -> Self:
        """Return a copy with some keys changed. Raises InvalidConfig as `from_mapping` does."""
        kept = {name: getattr(self, name) for name in _KINDS}
        return type(self)(**(kept | _by_field_name(settings)))

    def to_mapping(self) -> dict[str, int | float | str]:
        """Return the keys whose values are not the defaults, with dots and JSON values, for `from_mapping`."""
        changed: dict[str, int | float | str] = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                changed[_dotted(name)] = str(value) if isinstance(value, FsyncPolicy) else value
        return changed

    def describe(self) -> list[ConfigLine]:
        """Return every key with its value and meaning, for display. `from_mapping` accepts these values."""
        lines = []
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            lines.append(ConfigLine(_dotted(name), kind.show(value), value == _DEFAULTS[name], _MEANINGS[name]))
        return lines


def _dotted(name: str) -> str:
    return name.replace("_", ".")


_KINDS: dict[str, _Kind] = {key.name: key.metadata["kind"] for key in fields(TopicConfig)}
_DEFAULTS: dict[str, object] = {key.name: key.default for key in fields(TopicConfig)}
_MEANINGS: dict[str, str] = {key.name: key.metadata["meaning"] for key in fields(TopicConfig)}

TOPIC_CONFIG_KEYS = tuple(map(_dotted, _KINDS))
"""The keys of a topic config, with dots."""


def _by_field_name(settings: Mapping[str, object]) -> dict[str, Any]:
    by_name: dict[str, object] = {}
    for key, value in settings.items():
        name = key.strip().lower().replace(".", "_").replace("-", "_")
        if name not in _KINDS:
            raise InvalidConfig(key, value, _known_keys(_dotted(name)))
        if name in by_name:
            raise InvalidConfig(key, value, f"the key {_dotted(name)} is given twice, in two spellings")
        by_name[name] = value
    return by_name


def _known_keys(unknown: str) -> str:
    import difflib  # loaded only after a mistake: it would slow down every command

    close = difflib.get_close_matches(unknown, TOPIC_CONFIG_KEYS, n=1)
    hint = f"no such key, did you mean {close[0]}? " if close else "no such key. "
    return f"{hint}The keys are {', '.join(TOPIC_CONFIG_KEYS)}"
