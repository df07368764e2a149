"""A value as JSON by the schema that it names, of the registry in the same store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.http.console import formatting
from segmentlog.http.context import Site
from segmentlog.schemas.any_values import document_decoder


def decoding_by(site: Site) -> Callable[[str, bytes], str | None]:
    """For `RecordPages`. What has no schema here, does not fit it, or is too large, is shown as any other value."""
    decode_document = document_decoder(site.store.schemas)

    def decode(topic: str, value: bytes) -> str | None:
        try:
            document = decode_document(topic, value)
            return None if document is None else formatting.indented(msgspec.json.encode(document))
        except (SegmentlogError, ValueError, TypeError, RecursionError):
            return None

    return decode
