"""A value as JSON by the schema that it names, of the registry in the same store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.http.site import Site
from segmentlog.schemas.any_values import AnyDeserializer


def decoding_by(site: Site) -> Callable[[str, bytes], str | None]:
    """For `RecordPages`. What has no schema here, or does not fit it, is shown as any other value."""
    deserializer = AnyDeserializer(site.store.schemas)

    def decode(topic: str, value: bytes) -> str | None:
        try:
            (found,) = deserializer.deserialize(topic, [value])
            return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
        except (SegmentlogError, ValueError, TypeError, LookupError, OSError):
            return None

    return decode
