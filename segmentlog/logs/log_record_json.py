"""Render a `logging.LogRecord` as JSON, whatever its fields contain."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_STANDARD: Final = {*logging.LogRecord("", 0, "", 0, "", None, None).__dict__, "message", "asctime", "taskName"}


def render(record: logging.LogRecord, message: str, static: Mapping[str, Any]) -> bytes:
    """Return one JSON object. Values that JSON cannot represent are converted with `str`.

    time, level, logger, message      the time in UTC, with microseconds; the message with its arguments
    process, thread, file, line       the process id, the name of the thread, the location of the call
    exc_info, stack                   as texts, if present
    ...                               ``static``, and the fields of ``extra``; ``extra.NAME`` if NAME is used above
    """
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": record.levelname,
        "logger": record.name,
        "message": message,
        "process": record.process,
        "thread": record.threadName,
        "file": record.pathname,
        "line": record.lineno,
    }
    if (task := record.__dict__.get("taskName")) is not None:
        fields["task"] = task
    if record.exc_info:
        fields["exc_info"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
    elif record.exc_text:
        fields["exc_info"] = record.exc_text
    if record.stack_info:
        fields["stack"] = record.stack_info
    for name, value in static.items():
        fields.setdefault(name, value)
    for name, value in record.__dict__.items():
        if name not in _STANDARD:
            if isinstance(value, bytes | bytearray):  # msgspec would write them as base64
                value = bytes(value).decode("utf-8", "backslashreplace")
            fields[f"extra.{name}" if name in fields else name] = value
    try:
        return _encoder.encode(fields)
    except Exception:
        return _encoder.encode({_text(name): _plain(value) for name, value in fields.items()})


def _plain(value: Any) -> Any:
    """Return the value if JSON can represent it, or else its `str`."""
    try:
        msgspec.json.decode(_encoder.encode(value))
    except Exception:
        return _text(value)
    return value


def _text(value: object) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:
        text = f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate is not valid text


_encoder = msgspec.json.Encoder(enc_hook=_text)
