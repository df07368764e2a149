"""Sweeping a place in an object store that is not shipping's alone."""

from __future__ import annotations

import time
from pathlib import Path

from objects.buckets import RUBBISH

from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.garbage_collection import sweep
from segmentlog.objects.restore.restore import restore
from segmentlog.store import LogStore


def test_what_others_keep_there_is_left_alone(tmp_path: Path) -> None:
    """Files of people in folders of these names, and another store that was shipped into one of them."""
    url = f"file://{tmp_path}/bucket"
    places = (url, f"{url}/segments", f"{url}/files/of/mine")
    for number, place in enumerate(places):
        with LogStore(tmp_path / f"store {number}", background=False) as store:
            log = store.create_topic("a", segment_records=1).partition(0)
            for value in (b"1", b"2"):
                log.append([value])
            store.ship(place)
    theirs = ("files/thesis.pdf", "segments/2026/7/photo", "tails/1-x.jpg", "files/@acls-0123456789ab")
    bucket = open_bucket(url)
    for name in (*theirs, RUBBISH):
        bucket.put(name, b"x")
    before = {one.key for one in bucket.list()}
    late_ms = int(time.time() * 1000) + 10_000
    assert sweep(bucket, late_ms, grace_ms=1).condemned == (RUBBISH,)
    sweep(bucket, late_ms + 10_000, grace_ms=1)
    assert before - {one.key for one in bucket.list()} == {RUBBISH}
    for number, place in enumerate(places):
        restore(open_bucket(place), str(tmp_path / f"restored {number}"))
