"""Encodes records as JSON, a batch at a time: one line or one event for each record.

UTF-8 data are encoded as text, other data as base64 in a field whose name ends in ``_base64``, as in files of
``segmentlog export``. With ``values=json``, a value that is JSON is embedded byte for byte; any other value is encoded
as ``value_text`` or ``value_base64``.
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

ValueEncoding = Literal["text", "json", "base64"]

_PIECE_BYTES: Final = 256 << 10
_NAMES_BYTES: Final = 80
"""Bytes of a document besides key, value and headers."""
_LINE_END: Final = re.compile(rb"[\r\n]")
"""Line ends between JSON tokens. In an event stream a bare CR ends a line, too."""
_encode_lines = msgspec.json.Encoder().encode_lines
_as_raw = msgspec.json.Decoder(Raw).decode


class HeaderDocument(Struct, gc=False):
    """One header of a record."""

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


def documents(batch: RecordBatch, value_encoding: ValueEncoding) -> list[RecordDocument]:
    """Return the records of a batch as documents."""
    partition = repeat(batch.partition)
    offsets, timestamps = batch.offsets.tolist(), batch.timestamps.tolist()
    keys: Any = batch.keys if batch.has_keys else repeat(None)
    if value_encoding == "text" and not batch.has_headers:
        try:
            texts = list(map(bytes.decode, batch.values))  # type: ignore[arg-type]
            key_texts: Any = list(map(bytes.decode, keys)) if batch.has_keys else keys
            return list(map(RecordDocument, partition, offsets, timestamps, key_texts, texts))
        except (TypeError, UnicodeDecodeError):
            pass  # some values are null or not UTF-8
    found = []
    headers: Any = batch.headers if batch.has_headers else repeat(())
    for offset, timestamp, key, value, pairs in zip(offsets, timestamps, keys, batch.values, headers, strict=False):
        document = RecordDocument(batch.partition, offset, timestamp)
        document.key, document.key_base64 = _text(key)
        if value is None:
            document.value = None
        elif value_encoding == "base64":
            document.value_base64 = b64encode(value).decode()
        elif value_encoding == "text" or not _put_json(document, value):
            text, document.value_base64 = _text(value)
            if value_encoding == "text":
                document.value = text
            elif text is not UNSET and text is not None:
                document.value_text = text
        if pairs:
            document.headers = _headers(pairs)
        found.append(document)
    return found


def _text(data: bytes | None) -> tuple[str | UnsetType | None, str | UnsetType]:
    """Return (text, base64), of which one is set."""
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


def lines(batch: RecordBatch, value_encoding: ValueEncoding) -> bytes:
    """Return a line of JSON for each record."""
    return _encode_lines(documents(batch, value_encoding))


def bare_values(batch: RecordBatch) -> bytes:
    """Return each value on a line of its own. Null becomes an empty line; a value with line feeds becomes several
    lines."""
    values: list[Any] = batch.values
    try:
        return b"\n".join(values) + b"\n"
    except TypeError:
        return b"\n".join([value or b"" for value in values]) + b"\n"


def events(
    batch: RecordBatch, value_encoding: ValueEncoding, id_prefix: bytes, id_suffix: bytes, *, at_each: bool = True
) -> bytes:
    """Return a server-sent event for each record.

    An id consists of ``id_prefix``, the offset after the record, and ``id_suffix``. With ``at_each`` every event has an
    id, otherwise only the last.
    """
    rendered = lines(batch, value_encoding).split(b"\n")
    if not at_each:
        rendered.pop()  # the empty string after the last line
        rendered[-1] = b"%b\nid: %b%d%b" % (rendered[-1], id_prefix, batch.next_offset, id_suffix)
        return b"".join([b"data: %b\n\n" % line for line in rendered])
    return b"".join(
        [
            b"id: %b%d%b\ndata: %b\n\n" % (id_prefix, offset + 1, id_suffix, line)
            for offset, line in zip(batch.offsets.tolist(), rendered, strict=False)
        ]
    )


def parts(batch: RecordBatch, end: int | None = None, more_bytes: int = 0) -> Iterator[RecordBatch]:
    """Yield the batch in parts of about 256 KiB, without records from offset ``end`` on.

    ``more_bytes`` is what each record adds besides its document.
    """
    stop = len(batch)
    if end is not None and batch.next_offset > end:
        stop = int(np.searchsorted(batch.offsets, np.int64(end)))
    count = batch.header.record_count
    step = max(1, count * _PIECE_BYTES // (batch.raw_size_bytes + max(count, 1) * (_NAMES_BYTES + more_bytes)))
    for start in range(0, stop, step):
        yield batch.slice(start, min(start + step, stop))


def list_of(rendered: Sequence[bytes]) -> bytes:
    """Return a JSON array of records that were rendered with `lines`."""
    return b"[" + b"".join(rendered)[:-1].replace(b"\n", b",") + b"]"
