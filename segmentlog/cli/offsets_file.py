"""Parse files with offsets of partitions: JSON or text, as Kafka's tools read and print them.

{"partitions": [{"topic": "orders", "partition": 0, "offset": 1200}], "version": 1}     kafka-delete-records.sh
# kafka-get-offsets.sh prints orders:0:1200, kafka-consumer-groups.sh --export orders,0,1200
orders 0 1200
"""

from __future__ import annotations

import re
from typing import IO, Final

import click
import msgspec

from segmentlog.arguments import as_topic_partition
from segmentlog.errors import SegmentlogError
from segmentlog.quantities import INT64_MAX
from segmentlog.records import TopicPartition

_BETWEEN: Final = re.compile(r"\s*[,:]\s*|\s+")
_EXPECTED: Final = "TOPIC PARTITION OFFSET (or with commas or colons between)"


class _Entry(msgspec.Struct):
    topic: str
    partition: int
    offset: int


class _Document(msgspec.Struct):
    partitions: list[_Entry]
    version: int = 1


_decoder = msgspec.json.Decoder(_Document)


def read_offsets(file: IO[bytes]) -> dict[TopicPartition, int]:
    """Return the offsets of the file given as ``--offsets``. Raises UsageError."""
    try:
        return parse_offsets(file.read())
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, SegmentlogError) as error:
        why = str(error)
    raise click.UsageError(f"--offsets: {click.format_filename(file.name)}: {why}")


def parse_offsets(data: bytes) -> dict[TopicPartition, int]:
    """Return the offset of each partition that is named. Raises ValueError, `InvalidTopicName`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error}") from None
    found: dict[TopicPartition, int] = {}
    for origin, entry in _document(text) if text.lstrip().startswith("{") else _lines(text):
        tp = as_topic_partition(entry.topic, entry.partition)
        if not 0 <= entry.offset <= INT64_MAX:
            raise ValueError(f"{origin}: {entry.offset} is not a valid offset of {tp}: offsets start at 0")
        if tp in found:
            raise ValueError(f"{origin}: {tp} appears twice")
        found[tp] = entry.offset
    if not found:
        raise ValueError("it names no partition")
    return found


def _document(text: str) -> list[tuple[str, _Entry]]:
    try:
        document = _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(
            f'expected JSON like {{"partitions": [{{"topic", "partition", "offset"}}]}}: {error}'
        ) from None
    if document.version != 1:
        raise ValueError(f"unsupported version {document.version}; expected version 1")
    return [(f"partitions[{index}]", entry) for index, entry in enumerate(document.partitions)]


def _lines(text: str) -> list[tuple[str, _Entry]]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = _BETWEEN.split(line.strip())
        if fields == [""] or line.lstrip().startswith("#"):
            continue
        try:
            topic, partition, offset = fields
            found.append((f"line {number}", _Entry(topic, _number(partition), _number(offset))))
        except ValueError:
            raise ValueError(f"line {number} is {line.strip()!r}; expected {_EXPECTED}") from None
    return found


def _number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text, re.ASCII):
        raise ValueError(text)
    return int(text)
