"""Remove the offset grants of topics that are excluded from shipping: no shipper extends these grants any more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Set

from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.log import offset_grants
from segmentlog.policy.shipped_topics import is_selected
from segmentlog.storage.grant_file import read_grant
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")


def release_excluded_topics(topics: Topics, patterns: tuple[str, ...], shipped: Set[str]) -> bool:
    """Remove the grants of all topics that match no pattern. Return False if a removal failed and must be tried again.

    Topics with an id in ``shipped`` keep their grants: the manifest still lists them, so a takeover would append to
    them.
    """
    is_done = True
    for name in topics.names(internal=True):
        if is_selected(name, patterns):
            continue
        with contextlib.suppress(UnknownTopic):  # deleted meanwhile, or renamed
            file = topics.read_topic_file(name)
            if file.topic_id in shipped:
                continue
            for number in range(file.partitions):
                try:
                    if read_grant(topics.fs, f"{topics.path}/{name}/{number}") is not None:
                        offset_grants.remove(topics.open_partition(name, number, file.topic_id).handle)
                except UnknownTopic:
                    break
                except (SegmentlogError, OSError) as error:
                    logger.warning(
                        "%s/%d: excluded from shipping, but its offset grant cannot be removed yet: %s. Appends stop at"
                        " the grant until a later cycle removes it", name, number, error,
                    )  # fmt: skip
                    is_done = False
    return is_done
