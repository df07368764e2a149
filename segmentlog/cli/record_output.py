"""Print records as lines, bare values, JSON, or with kcat's templates."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

Render = Callable[["RecordBatch"], bytes]
Pieces = Callable[["RecordBatch"], list[bytes]]
"""Returns the text of each record of a batch."""


def choose_pieces(
    template: str | None, bare: bool, as_json: bool, *, json_values: bool = False, sources: bool = False
) -> Pieces:
    """Return the function that formats each record of a batch: by a template, as value only, as JSON, or as text.

    The text is "offset value", and with ``sources`` "topic/partition offset value". ``json_values``: print values that
    are JSON without quoting them.
    """
    if as_json:
        return json_pieces(plain_values=json_values)
    if bare:
        return bare_pieces
    if template is not None:
        return _as_template(template)
    return _sourced_pieces if sources else _line_pieces


def batch_renderer(pieces: Pieces) -> Render:
    """Return a function that returns the text of a whole batch: the concatenated ``pieces``."""
    return _render_values if pieces is bare_pieces else lambda batch: b"".join(pieces(batch))


def _render_values(batch: RecordBatch) -> bytes:
    values: list[Any] = batch.values
    try:
        return b"\n".join(values) + b"\n"
    except TypeError:  # a null value prints as an empty line
        return b"\n".join([value or b"" for value in values]) + b"\n"


def bare_pieces(batch: RecordBatch) -> list[bytes]:
    """Return the values, one per line; a null value is an empty line."""
    return [(value or b"") + b"\n" for value in batch.values]


def keyed_pieces(batch: RecordBatch) -> list[bytes]:
    """Return key, tab and value of each record; null is empty."""
    return [b"%b\t%b\n" % (key or b"", value or b"") for key, value in zip(batch.keys, batch.values, strict=True)]


def _sourced_pieces(batch: RecordBatch) -> list[bytes]:
    source = f"{batch.topic}/{batch.partition} ".encode()
    return [source + piece for piece in _line_pieces(batch)]


def _line_pieces(batch: RecordBatch) -> list[bytes]:
    return [
        b"%d %b\n" % (offset, value or b"") for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
    ]


def json_pieces(*, plain_values: bool) -> Pieces:
    """Return a function that renders one JSON object per line.

    ``plain_values``: print values that are JSON as JSON and not as text.
    """

    def pieces(batch: RecordBatch) -> list[bytes]:
        import msgspec

        from segmentlog.exchange.record_files import record_document

        found = []
        for record in batch.records():
            document = record_document(record)
            if plain_values and record.value is not None and (text := _as_json(record.value)) is not None:
                document["value"] = msgspec.Raw(text)
            found.append(msgspec.json.encode(document) + b"\n")
        return found

    return pieces


def _as_json(value: bytes) -> bytes | None:
    """Return JSON on one line, with numbers and texts as they are. Returns None if ``value`` is invalid JSON."""
    import msgspec

    try:
        value.decode()  # `format` does not check the UTF-8 of strings
        return msgspec.json.format(value, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _as_template(template: str) -> Pieces:
    parts = _parse(template)

    def pieces(batch: RecordBatch) -> list[bytes]:
        return [b"".join([part if isinstance(part, bytes) else part(record) for part in parts]) for record in batch]

    return pieces


_TOKENS: dict[str, Callable[[Any], bytes]] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "T": lambda record: b"%d" % record.timestamp,
    "h": lambda record: b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers),
    "K": lambda record: b"%d" % (-1 if record.key is None else len(record.key)),
    "S": lambda record: b"%d" % (-1 if record.value is None else len(record.value)),
    "%": lambda record: b"%",
}
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def _parse(template: str) -> list[bytes | Callable[[Any], bytes]]:
    """Parse one of kcat's templates: %-tokens and backslash escapes; other characters are literal."""
    pieces: list[bytes | Callable[[Any], bytes]] = []
    characters = iter(template)
    for character in characters:
        if character == "%":
            token = next(characters, "")
            if token not in _TOKENS:
                raise click.UsageError(
                    f"--format: unknown token %{token}; known tokens: " + " ".join(f"%{t}" for t in _TOKENS)
                )
            pieces.append(_TOKENS[token])
        elif character == "\\":
            escape = next(characters, "")
            if escape not in _ESCAPES:
                raise click.UsageError(f"--format: unknown escape \\{escape}; known escapes: \\n \\t \\r \\0 \\\\")
            pieces.append(_ESCAPES[escape])
        else:
            pieces.append(os.fsencode(character))
    return pieces
