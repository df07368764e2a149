"""A value as JSON by the schema that it names, of the registry in the same store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.http.console import showing
from segmentlog.http.site import Site
from segmentlog.schemas.any_values import AnyDeserializer


def decoding_by(site: Site) -> Callable[[str, bytes], str | None]:
    """For `RecordPages`. What has no schema here, does not fit it, or is too large, is shown as any other value."""
    deserializer = AnyDeserializer(site.store.schemas)

    def decode(topic: str, value: bytes) -> str | None:
        try:
            (found,) = deserializer.deserialize(topic, [value])
            return showing.indented(msgspec.json.encode(found))
        except (SegmentlogError, ValueError, TypeError, LookupError, OSError, RecursionError):
            return None

    return decode
