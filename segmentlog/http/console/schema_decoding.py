"""Decodes values to JSON by their schemas, from the registry of the same store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.http.console import formatting
from segmentlog.http.context import HttpContext
from segmentlog.schemas.any_values import document_decoder


def schema_decoder(context: HttpContext) -> Callable[[str, bytes], str | None]:
    """Return the ``decode`` function of `RecordPages`.

    It returns None for values without a known schema, values that do not match it and values that are too large.
    """
    decode_document = document_decoder(context.store.schemas)

    def decode(topic: str, value: bytes) -> str | None:
        try:
            document = decode_document(topic, value)
            return None if document is None else formatting.format_json(msgspec.json.encode(document))
        except (SegmentlogError, ValueError, TypeError, RecursionError):
            return None

    return decode
