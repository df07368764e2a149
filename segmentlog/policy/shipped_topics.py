"""Which topics of a store are shipped."""

from __future__ import annotations

from fnmatch import fnmatchcase

from segmentlog.format.file_names import INTERNAL_TOPICS


def is_selected(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a topic is shipped. Internal topics are, and topics that match; without patterns all are."""
    return name in INTERNAL_TOPICS or not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
