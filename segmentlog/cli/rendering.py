"""What records look like on stdout: a batch at a time, in as few steps of Python as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.records import Headers

Render = Callable[["RecordBatch"], bytes]


def renderer(template: str | None, bare: bool, as_json: bool) -> Render:
    """The one that was asked for: a template, values only, JSON, or else "offset value". ValueError as `compiled`."""
    if as_json:
        return render_json
    if bare:
        return render_values
    return compiled("%o %s\\n" if template is None else template)


def render_values(batch: RecordBatch) -> bytes:
    """Values, one a line; a null value is an empty line."""
    values: list[Any] = batch.values
    try:
        return b"\n".join(values) + b"\n"
    except TypeError:
        return b"\n".join(_filled(values)) + b"\n"


def _filled(blobs: Sequence[bytes | None]) -> list[bytes]:
    return [b"" if blob is None else blob for blob in blobs]


# ---------------------------------------------------------------- templates

# One conversion of bytes-formatting for each token, and the column that goes in.
_TOKENS: Final[dict[str, tuple[bytes, Callable[[RecordBatch], Sequence[Any]]]]] = {
    "t": (b"%b", lambda batch: [batch.topic.encode()] * len(batch)),
    "p": (b"%d", lambda batch: [batch.partition] * len(batch)),
    "o": (b"%d", lambda batch: batch.offsets.tolist()),
    "k": (b"%b", lambda batch: _filled(batch.keys)),
    "s": (b"%b", lambda batch: _filled(batch.values)),
    "K": (b"%d", lambda batch: _lengths(batch.keys)),
    "S": (b"%d", lambda batch: _lengths(batch.values)),
    "R": (b"%b", lambda batch: [size.to_bytes(4, "big", signed=True) for size in _lengths(batch.values)]),
    "T": (b"%d", lambda batch: batch.timestamps.tolist()),
    "h": (b"%b", lambda batch: list(map(_header_text, batch.headers))),
}
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def _lengths(blobs: Sequence[bytes | None]) -> list[int]:
    """-1 for a null, as kcat has it."""
    return [-1 if blob is None else len(blob) for blob in blobs]


def _header_text(headers: Headers) -> bytes:
    return b",".join(name.encode() + b"=" + (b"NULL" if value is None else value) for name, value in headers)


def compiled(template: str) -> Render:
    r"""A renderer for a template of kcat's: %-tokens, and \n \t \r \0 \\ \xHH; anything else stands for itself.

    Raises ValueError for what is neither.
    """
    pattern = b""
    columns: list[Callable[[RecordBatch], Sequence[Any]]] = []
    at = 0
    while at < len(template):
        character, following = template[at], template[at + 1 : at + 2]
        at += 2
        if character == "%" and following == "%":
            pattern += b"%%"
        elif character == "%":
            if following not in _TOKENS or not following:
                raise ValueError(f"%{following} is no token; there are {' '.join(f'%{one}' for one in _TOKENS)} %%")
            conversion, column = _TOKENS[following]
            pattern += conversion
            columns.append(column)
        elif character == "\\":
            if following == "x":
                pattern += _hexadecimal(template[at : at + 2])
                at += 2
            elif following in _ESCAPES:
                pattern += _ESCAPES[following]
            else:
                raise ValueError(f"\\{following} is no escape; there are \\n \\t \\r \\0 \\\\ \\xHH")
        else:
            at -= 1
            pattern += character.encode("utf-8", "surrogateescape")

    def render(batch: RecordBatch) -> bytes:
        return b"".join(map(pattern.__mod__, zip(*[column(batch) for column in columns], strict=True)))

    def render_constant(batch: RecordBatch) -> bytes:
        return pattern % () * len(batch)

    return render if columns else render_constant


def _hexadecimal(digits: str) -> bytes:
    if len(digits) != 2 or not set(digits) <= set("0123456789abcdefABCDEF"):
        raise ValueError(f"\\x{digits} is no escape; two hexadecimal digits follow \\x")
    return bytes.fromhex(digits).replace(b"%", b"%%")


# ---------------------------------------------------------------- JSON


class _Line(msgspec.Struct):
    """A record for JSON: bytes that are UTF-8 as text, others in a field of their own as base64."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: str | None | msgspec.UnsetType
    key_base64: str | msgspec.UnsetType
    value: str | None | msgspec.UnsetType
    value_base64: str | msgspec.UnsetType
    headers: list[dict[str, str | None]] | msgspec.UnsetType


_encode_lines = msgspec.json.Encoder().encode_lines
_unset = msgspec.UNSET


def render_json(batch: RecordBatch) -> bytes:
    """One JSON object a record, which `produce --format json` takes back as it is."""
    keys, binary_keys = _texts(batch.keys) if batch.header.keys_size else (repeat(None), repeat(_unset))
    values, binary_values = _texts(batch.values)
    headers: Any = repeat(_unset)
    if batch.header.headers_size:
        headers = [list(map(_header_document, one)) if one else _unset for one in batch.headers]
    lines = map(
        _Line, repeat(batch.topic), repeat(batch.partition), batch.offsets.tolist(), batch.timestamps.tolist(),
        keys, binary_keys, values, binary_values, headers,
    )  # fmt: skip
    return _encode_lines(list(lines))


def _texts(blobs: Sequence[Any]) -> tuple[Any, Any]:
    """(the column as text, the column as base64), of each record one of them unset."""
    try:
        return list(map(bytes.decode, blobs)), repeat(_unset)
    except (TypeError, UnicodeDecodeError):
        pass  # nulls, or binary
    pairs = list(map(_text_or_base64, blobs))
    return [text for text, _ in pairs], [encoded for _, encoded in pairs]


def _text_or_base64(blob: bytes | None) -> tuple[Any, Any]:
    if blob is None:
        return None, _unset
    try:
        return blob.decode(), _unset
    except UnicodeDecodeError:
        from base64 import b64encode

        return _unset, b64encode(blob).decode()


def _header_document(header: tuple[str, bytes | None]) -> dict[str, str | None]:
    """Under the names of Spark's schema for headers."""
    text, encoded = _text_or_base64(header[1])
    return {"key": header[0], "value": text} if encoded is _unset else {"key": header[0], "value_base64": encoded}
