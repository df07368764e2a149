"""Offsets of partitions in a file: as Kafka's tools have them, or a line for each.

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
_WANTED: Final = "TOPIC PARTITION OFFSET (or with commas or colons between)"


class _Entry(msgspec.Struct):
    topic: str
    partition: int
    offset: int


class _Document(msgspec.Struct):
    partitions: list[_Entry]
    version: int = 1


_decoder = msgspec.json.Decoder(_Document)


def read_offsets(file: IO[bytes]) -> dict[TopicPartition, int]:
    """What is in a file that was given as ``--offsets``. Raises UsageError."""
    try:
        return parse_offsets(file.read())
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, SegmentlogError) as error:
        why = str(error)
    raise click.UsageError(f"--offsets: {click.format_filename(file.name)}: {why}")


def parse_offsets(data: bytes) -> dict[TopicPartition, int]:
    """The offset of each partition that is named. Raises ValueError, `InvalidTopicName`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8: {error}") from None
    found: dict[TopicPartition, int] = {}
    for where, entry in _document(text) if text.lstrip().startswith("{") else _lines(text):
        tp = as_topic_partition(entry.topic, entry.partition)
        if not 0 <= entry.offset <= INT64_MAX:
            raise ValueError(f"{where}: {entry.offset} is no offset of {tp}: those go from 0 on")
        if tp in found:
            raise ValueError(f"{where}: {tp} is there twice")
        found[tp] = entry.offset
    if not found:
        raise ValueError("it names no partition")
    return found


def _document(text: str) -> list[tuple[str, _Entry]]:
    try:
        document = _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f'JSON of {{"partitions": [{{"topic", "partition", "offset"}}]}} is wanted: {error}') from None
    if document.version != 1:
        raise ValueError(f"JSON of version {document.version}; this reads version 1")
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
            raise ValueError(f"line {number} is {line.strip()!r}, and not {_WANTED}") from None
    return found


def _number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text, re.ASCII):
        raise ValueError(text)
    return int(text)
