"""Topics that are shipped no more, though others of the store are: nobody raises their ceilings, so they need none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Set

from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.log import offset_grants
from segmentlog.objects.local.partition_snapshot import is_wanted
from segmentlog.storage.grant_file import read_grant
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")


def release_unwanted(topics: Topics, wanted: tuple[str, ...], there: Set[str]) -> bool:
    """Let all partitions go on alone that are not wanted; false if that is to be tried again for any.

    ``there``: ids of the topics that the manifest has, which lies there: who took the store over would go on with them.
    """
    is_done = True
    for name in topics.names(internal=True):
        if is_wanted(name, wanted):
            continue
        with contextlib.suppress(UnknownTopic):  # deleted meanwhile, or renamed
            file = topics.read_topic_file(name)
            if file.topic_id in there:
                continue
            for number in range(file.partitions):
                try:
                    if read_grant(topics.fs, f"{topics.path}/{name}/{number}") is not None:
                        offset_grants.release(topics.open_partition(name, number, file.topic_id).handle)
                except UnknownTopic:
                    break
                except (SegmentlogError, OSError) as error:
                    logger.warning("%s/%d: is not shipped any more, and needs grants still: %s", name, number, error)
                    is_done = False
    return is_done
