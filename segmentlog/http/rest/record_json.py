"""Records as JSON, a batch at a time: a line each, or an event each.

What is UTF-8 comes as text; anything else as base64, in a field whose name ends in ``_base64``: as in files that
``segmentlog export`` writes. With values as JSON a value that is JSON is part of the document, byte for byte; one that
is none comes as ``value_text`` or ``value_base64``.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.records import Headers

ValuesAs = Literal["text", "json", "base64"]

_PIECE_BYTES: Final = 256 << 10
_NAMES_BYTES: Final = 80
"""What a document has beside key, value and headers."""
_LINE_END: Final = re.compile(rb"[\r\n]")
"""Between its tokens, where JSON has both; for an event stream a bare CR ends a line, too."""
_encode_lines = msgspec.json.Encoder().encode_lines
_as_raw = msgspec.json.Decoder(Raw).decode


class HeaderDocument(Struct, gc=False):
    """One header."""

    name: str
    value: str | UnsetType | None = UNSET
    value_base64: str | UnsetType = UNSET


class RecordDocument(Struct, gc=False):
    """One record."""

    partition: int
    offset: int
    timestamp: int
    key: str | UnsetType | None = UNSET
    value: Any = UNSET
    headers: list[HeaderDocument] | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    value_text: str | UnsetType = UNSET


def documents(batch: RecordBatch, values_as: ValuesAs) -> list[RecordDocument]:
    """The records of a batch."""
    partition = repeat(batch.partition)
    offsets, timestamps = batch.offsets.tolist(), batch.timestamps.tolist()
    keys: Any = batch.keys if batch.has_keys else repeat(None)
    if values_as == "text" and not batch.has_headers:
        try:
            texts = list(map(bytes.decode, batch.values))  # type: ignore[arg-type]
            key_texts: Any = list(map(bytes.decode, keys)) if batch.has_keys else keys
            return list(map(RecordDocument, partition, offsets, timestamps, key_texts, texts))
        except (TypeError, UnicodeDecodeError):
            pass  # nulls among them, or what is no text
    found = []
    headers: Any = batch.headers if batch.has_headers else repeat(())
    for offset, timestamp, key, value, pairs in zip(offsets, timestamps, keys, batch.values, headers, strict=False):
        document = RecordDocument(batch.partition, offset, timestamp)
        document.key, document.key_base64 = _text(key)
        if value is None:
            document.value = None
        elif values_as == "base64":
            document.value_base64 = b64encode(value).decode()
        elif values_as == "text" or not _put_json(document, value):
            text, document.value_base64 = _text(value)
            if values_as == "text":
                document.value = text
            elif text is not UNSET and text is not None:
                document.value_text = text
        if pairs:
            document.headers = _headers(pairs)
        found.append(document)
    return found


def _text(data: bytes | None) -> tuple[str | UnsetType | None, str | UnsetType]:
    """(as text, as base64): one of them."""
    if data is None:
        return None, UNSET
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError:
        return UNSET, b64encode(data).decode()


def _put_json(document: RecordDocument, value: bytes) -> bool:
    try:
        if not value.isascii():
            value.decode()
        document.value = _as_raw(msgspec.json.format(value, indent=-1) if _LINE_END.search(value) else value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _headers(pairs: Headers) -> list[HeaderDocument]:
    found = []
    for name, value in pairs:
        text, encoded = _text(value)
        found.append(HeaderDocument(name, text, encoded))
    return found


def lines(batch: RecordBatch, values_as: ValuesAs) -> bytes:
    """A line of JSON each."""
    return _encode_lines(documents(batch, values_as))


def bare_values(batch: RecordBatch) -> bytes:
    """The values alone, a line each; null is an empty line, and a value with line feeds is several."""
    values: list[Any] = batch.values
    try:
        return b"\n".join(values) + b"\n"
    except TypeError:
        return b"\n".join([value or b"" for value in values]) + b"\n"


def events(batch: RecordBatch, values_as: ValuesAs, begin: bytes, end: bytes, *, at_each: bool = True) -> bytes:
    """A server-sent event each, with an id ``at_each`` or at the last: ``begin``, the offset behind it, ``end``."""
    rendered = lines(batch, values_as).split(b"\n")
    if not at_each:
        rendered.pop()  # what is behind the last line
        rendered[-1] = b"%b\nid: %b%d%b" % (rendered[-1], begin, batch.next_offset, end)
        return b"".join([b"data: %b\n\n" % line for line in rendered])
    return b"".join(
        [
            b"id: %b%d%b\ndata: %b\n\n" % (begin, offset + 1, end, line)
            for offset, line in zip(batch.offsets.tolist(), rendered, strict=False)
        ]
    )


def parts(batch: RecordBatch, end: int | None = None, more_bytes: int = 0) -> Iterator[RecordBatch]:
    """The batch in parts that come to about 256 KiB, without records at ``end`` and above.

    ``more_bytes`` are those that each record has beside its document.
    """
    stop = len(batch)
    if end is not None and batch.next_offset > end:
        stop = int(np.searchsorted(batch.offsets, np.int64(end)))
    count = batch.header.record_count
    step = max(1, count * _PIECE_BYTES // (batch.raw_size_bytes + max(count, 1) * (_NAMES_BYTES + more_bytes)))
    for start in range(0, stop, step):
        yield batch.slice(start, min(start + step, stop))


def list_of(rendered: Sequence[bytes]) -> bytes:
    """A JSON array of all records that were rendered as `lines`."""
    return b"[" + b"".join(rendered)[:-1].replace(b"\n", b",") + b"]"
