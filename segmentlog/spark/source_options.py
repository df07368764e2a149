"""Parse and check the options of the data source, which Spark passes as text under lower-case names.

An option has the name that Spark's Kafka source or sink gives it, if they have such an option.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, cast, get_args

import msgspec

from segmentlog.defaults import REMOTE_CACHE_BYTES
from segmentlog.errors import InvalidConfig
from segmentlog.format.file_names import check_topic_name
from segmentlog.log.partition import Isolation
from segmentlog.objects.bucket.url import check_scheme, is_url
from segmentlog.quantities import parse_count, parse_duration_ms, parse_size
from segmentlog.records import TopicPartition
from segmentlog.spark.store_opener import StoreLocation, resolve_location, resolve_writable_folder

logger = logging.getLogger("segmentlog")

EARLIEST: Final = -2
LATEST: Final = -1
"""The two numbers that JSON offsets use for "earliest" and "latest", as in Spark's Kafka source."""

NoMatch = Literal["error", "latest"]
InvalidText = Literal["error", "null", "replace"]
"""Treatment of a key or value read as text that is not UTF-8: fail, return null, or replace bytes with U+FFFD."""

_FIFTEEN_MINUTES_MS: Final = 15 * 60_000
_INT64_MAX: Final = 2**63 - 1


class Bound(msgspec.Struct, frozen=True):
    """The start or end of a read, as the user gave it."""

    option: str
    """The option that sets this bound; error messages name it."""
    at: Literal["earliest", "latest", "offsets", "timestamps", "timestamp"]
    per_partition: dict[str, dict[int, int]] = {}
    """Offsets, or milliseconds since 1970, by topic and partition; for "offsets" and "timestamps" only."""
    timestamp_ms: int = -1
    """Milliseconds since 1970, for every partition; for "timestamp" only."""


class ReadOptions(msgspec.Struct, frozen=True):
    """The checked options of the source."""

    path: str
    """The folder of the store, or the URL of an object store."""
    topics: tuple[str, ...]
    pattern: str | None
    partitions: tuple[TopicPartition, ...] | None
    starting: Bound
    ending: Bound
    no_match: NoMatch
    fail_on_data_loss: bool
    include_headers: bool
    isolation: Isolation
    durable_only: bool
    min_partitions: int | None
    max_records_per_partition: int | None
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    max_trigger_delay_ms: int
    group: str | None
    skip_damaged: bool
    invalid_text: InvalidText
    cache_bytes: int
    """Size of the cache that each Python process of an executor keeps of an object store."""
    cache_dir: str | None

    @property
    def location(self) -> StoreLocation:
        """The store to read from."""
        return StoreLocation(self.path, self.topics, self.cache_bytes, self.cache_dir)


class WriteOptions(msgspec.Struct, frozen=True):
    """The checked options of the sink."""

    path: str
    topic: str | None
    allow_null_values: bool
    transaction_timeout_ms: int
    app_id: str | None
    app_version: int | None
    """With ``app_id``: a growing number. A write is skipped if ``app_id`` already wrote this version or a newer one."""


_READ = (
    "path", "subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy", "failOnDataLoss", "includeHeaders", "isolation", "durableOnly",
    "minPartitions", "maxRecordsPerPartition", "maxOffsetsPerTrigger", "minOffsetsPerTrigger",
    "maxBytesPerTrigger", "maxTriggerDelay", "groupId", "skipDamaged", "invalidText", "cacheBytes",
    "cacheDir", "compatible",
)  # fmt: skip
_STREAM_ONLY = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxBytesPerTrigger", "maxTriggerDelay", "groupId")
_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_WRITE = ("path", "topic", "allowNullValues", "transactionTimeout", "txnAppId", "txnVersion", "compatible")
VIEW_STATEMENT: Final = "CREATE TEMPORARY VIEW name USING segmentlog OPTIONS (path '...', subscribe '...')"
TABLE_ADVICE: Final = f"Spark drops the options of tables of a Python source; create a view instead: {VIEW_STATEMENT}"
_SPARK_OPTIONS = frozenset(("checkpointlocation", "queryname", "outputmode"))
# Options of a streaming query, which Spark passes to the sink too.


def parse_read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Parse the options of `spark.read` or `spark.readStream`. Raises `InvalidConfig`."""
    given = _GivenOptions(options, _READ, others=_WRITE)
    path = given.path()
    if given.compatible and not streaming:
        given.drop_ignored(_STREAM_ONLY)  # as Spark's Kafka source does
    wrong_side = [name for name in (_BATCH_ONLY if streaming else _STREAM_ONLY) if given.text(name) is not None]
    if wrong_side:
        kind, other = ("streaming", "spark.read") if streaming else ("batch", "spark.readStream")
        why = f"an option of {other}; leave it out of a {kind} read"
        raise InvalidConfig(wrong_side[0], given.text(wrong_side[0]), why)
    topics, pattern, partitions = _parse_subscription(given)
    strategy = given.choice("startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    group = given.text("groupId")
    if group is not None and is_url(path):
        why = "leave it out of a read from an object store; only a store in a local folder can commit positions"
        raise InvalidConfig("groupId", group, why)
    delay_ms = given.number("maxTriggerDelay", parse_duration_ms, "a time, such as 15m")
    return ReadOptions(
        path=path,
        topics=topics,
        pattern=pattern,
        partitions=partitions,
        starting=_parse_bound(given, "starting", "latest" if streaming else "earliest"),
        ending=_parse_bound(given, "ending", "latest"),
        no_match=cast(NoMatch, strategy),
        fail_on_data_loss=given.flag("failOnDataLoss", default=True),
        include_headers=given.flag("includeHeaders", default=False),
        isolation=cast(Isolation, given.choice("isolation", get_args(Isolation), "read_committed")),
        durable_only=given.flag("durableOnly", default=False),
        min_partitions=given.count("minPartitions"),
        max_records_per_partition=given.count("maxRecordsPerPartition"),
        max_offsets_per_trigger=given.count("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=given.count("minOffsetsPerTrigger"),
        max_bytes_per_trigger=given.number("maxBytesPerTrigger", parse_size, "a size, such as 64MiB", least=1),
        max_trigger_delay_ms=_FIFTEEN_MINUTES_MS if delay_ms is None else delay_ms,
        group=group,
        skip_damaged=given.flag("skipDamaged", default=False),
        invalid_text=cast(InvalidText, given.choice("invalidText", get_args(InvalidText), "error")),
        cache_bytes=given.number("cacheBytes", parse_size, "a size, such as 256MiB", least=1) or REMOTE_CACHE_BYTES,
        cache_dir=given.text("cacheDir"),
    )


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of `df.write` or `df.writeStream`. Raises `InvalidConfig`."""
    given = _GivenOptions(options, _WRITE, others=_READ)
    topic = given.text("topic") or _find_subscribed_topic(options)
    if topic is not None:
        check_topic_name(topic)
    app_id, version = given.text("txnAppId"), given.number("txnVersion", parse_count, "a whole number from 0 on")
    if (app_id is None) != (version is None):
        name = "txnVersion" if version is None else "txnAppId"
        raise InvalidConfig(name, None, "set it together with " + ("txnAppId" if version is None else "txnVersion"))
    timeout_ms = given.number("transactionTimeout", parse_duration_ms, "a time, such as 15m", least=1)
    return WriteOptions(
        path=resolve_writable_folder(given.path()),
        topic=topic,
        allow_null_values=given.flag("allowNullValues", default=False),
        transaction_timeout_ms=min(timeout_ms or _FIFTEEN_MINUTES_MS, 86_400_000),
        app_id=app_id,
        app_version=version,
    )


class _GivenOptions:
    """The options that the user gave, by canonical name. Every method raises `InvalidConfig`."""

    def __init__(self, options: Mapping[str, str], names: Iterable[str], *, others: Iterable[str]) -> None:
        """Accept ``names``, and ignore ``others``: a read ignores the options of the sink, and a write the source's.

        A view is used for both, and has one set of options.
        """
        known = {name.lower(): name for name in names}
        passed_over = _SPARK_OPTIONS | {name.lower() for name in others}
        self._values: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for key, value in options.items():
            name = known.get(key.lower())
            if name is not None:
                self._values[name] = value
            elif key.lower() not in passed_over:
                unknown[key] = value
        self.compatible = self.flag("compatible", default=False)
        for key, value in unknown.items():
            if not self.compatible:
                raise InvalidConfig(key, value, _describe_unknown(key, known))
            near = _find_closest(key, known)
            _warn_once(f"option {key} has no effect" + (f"; did you mean {near}?" if near else ""))

    def drop_ignored(self, names: Iterable[str]) -> None:
        """Drop these options, and log a warning for each that the user gave."""
        for name in names:
            if self._values.pop(name, None) is not None:
                _warn_once(f"option {name} has no effect")

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def path(self) -> str:
        """Return the absolute path of a folder, or the URL of an object store."""
        path = self._values.get("path")
        if not path:
            accepted = "the folder of the store, or the URL of an object store: .option('path', '...') or .load('...')"
            raise InvalidConfig("path", path, accepted + ("" if self._values else f"; {TABLE_ADVICE}"))
        place = resolve_location(path)
        return check_scheme("path", place) if is_url(place) else place

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        text = self._values.get(name, default)
        if text.lower() not in choices:
            raise InvalidConfig(name, text, "one of " + ", ".join(choices))
        return text.lower()

    def flag(self, name: str, *, default: bool) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def count(self, name: str) -> int | None:
        return self.number(name, parse_count, "a whole number from 1 on", least=1)

    def number(self, name: str, parse: Callable[[object], int], accepted: str, *, least: int = 0) -> int | None:
        """Return the option as a number of at least ``least``, or None for a missing option.

        The parsers also accept -1, "unlimited" and the like; the options of the data source do not.
        """
        text = self._values.get(name)
        if text is None:
            return None
        try:
            found = parse(text)
        except (ValueError, TypeError, LookupError):
            found = -1
        if not least <= found <= _INT64_MAX:
            raise InvalidConfig(name, text, accepted)
        return found

    def numbers(self, name: str, what: str) -> dict[str, dict[int, int]]:
        """Parse JSON such as ``{"clicks": {"0": 23, "1": -2}}``."""
        text = self._values[name]
        accepted = f'JSON that gives {what} by topic and partition: {{"clicks": {{"0": 23, "1": 45}}}}'
        try:
            document = json.loads(text)
            return {
                check_topic_name(topic, internal=True): {
                    _parse_partition_number(number): _check_whole_number(value) for number, value in numbers.items()
                }
                for topic, numbers in document.items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            why = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
            raise InvalidConfig(name, text, accepted + why) from None


def _find_subscribed_topic(options: Mapping[str, str]) -> str | None:
    """Return the topic of a view that subscribes to a single topic: an INSERT into the view appends to it."""
    topics = next((value for key, value in options.items() if key.lower() == "subscribe"), "")
    return topics.strip() if topics.strip() and "," not in topics else None


_warned: Final[set[str]] = set()
# Spark parses the options of a query again for every micro-batch: warn once per process.


def _warn_once(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        logger.warning("%s", sentence)


def _describe_unknown(key: str, known: Mapping[str, str]) -> str:
    if key.lower().startswith("kafka."):
        return "segmentlog has no broker; set the option compatible = true to ignore options of the Kafka client"
    near = _find_closest(key, known)
    if near:
        return f"there is no such option; did you mean {near}?"
    return "there is no such option; there are " + ", ".join(known.values())


def _find_closest(key: str, known: Mapping[str, str]) -> str | None:
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6)
    return known[near[0]] if near else None


def _parse_subscription(given: _GivenOptions) -> tuple[tuple[str, ...], str | None, tuple[TopicPartition, ...] | None]:
    names = ("subscribe", "subscribePattern", "assign")
    found = [name for name in names if given.text(name) is not None]
    if len(found) != 1:
        accepted = "set exactly one of subscribe, subscribePattern and assign"
        raise InvalidConfig("subscribe", " and ".join(found) or None, accepted)
    text = given.text(found[0]) or ""
    if found[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidConfig("subscribePattern", text, f"a regular expression ({error})") from None
        return (), text, None
    if found[0] == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for topic in topics:
            check_topic_name(topic, internal=True)
        return topics, None, None
    accepted = 'JSON that lists partitions by topic: {"clicks": [0, 1]}'
    try:
        document = json.loads(text)
        partitions = tuple(
            TopicPartition(
                check_topic_name(topic, internal=True), _parse_partition_number(str(_check_whole_number(number)))
            )
            for topic, numbers in document.items()
            for number in numbers
        )
    except (ValueError, TypeError, AttributeError):
        raise InvalidConfig("assign", text, accepted) from None
    if not partitions:
        raise InvalidConfig("assign", text, accepted)
    return tuple(dict.fromkeys(tp.topic for tp in partitions)), None, tuple(sorted(set(partitions)))


def _parse_bound(given: _GivenOptions, side: str, default: Literal["earliest", "latest"]) -> Bound:
    """Return the bound of one side, "starting" or "ending".

    As in Spark's Kafka source, a timestamp for all partitions wins over timestamps by partition, and both win over
    offsets.
    """
    timestamp_option, timestamps_option = f"{side}Timestamp", f"{side}OffsetsByTimestamp"
    offsets_option = f"{side}Offsets"
    if given.text(timestamp_option) is not None:
        timestamp_ms = given.number(timestamp_option, parse_count, "milliseconds since 1970")
        return Bound(timestamp_option, "timestamp", timestamp_ms=timestamp_ms or 0)
    if given.text(timestamps_option) is not None:
        timestamps = given.numbers(timestamps_option, "milliseconds since 1970")
        if any(time_ms < 0 for by_partition in timestamps.values() for time_ms in by_partition.values()):
            raise InvalidConfig(
                timestamps_option,
                given.text(timestamps_option),
                "milliseconds since 1970, from 0 on; 'earliest' reads older records too",
            )
        return Bound(timestamps_option, "timestamps", timestamps)
    text = given.text(offsets_option)
    word = (text or default).strip().lower()
    if word == "earliest" and side == "ending":
        raise InvalidConfig(
            offsets_option, text, "latest, or offsets as JSON; a read cannot end at the earliest offset"
        )
    if word in ("earliest", "latest"):
        return Bound(offsets_option, cast(Any, word))
    numbers = given.numbers(offsets_option, "offsets (-2 the earliest, -1 the latest)")
    for topic, by_partition in numbers.items():
        for number, offset in by_partition.items():
            if offset < (EARLIEST if side == "starting" else LATEST):
                accepted = f"{topic}/{number}: an offset from 0 on, or -1 for the latest" + (
                    ", or -2 for the earliest" if side == "starting" else ""
                )
                raise InvalidConfig(offsets_option, text, accepted)
    return Bound(offsets_option, "offsets", numbers)


def _parse_partition_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a partition number")
    return int(text)


def _check_whole_number(number: object) -> int:
    if type(number) is not int or number > _INT64_MAX:
        raise TypeError(f"{number!r} is not a whole number")
    return number
