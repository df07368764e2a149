"""Topics that another process deletes or renames while this process has them open."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from leftovers import files_open_below

import segmentlog


def _deleted_maps() -> int:
    return Path("/proc/self/maps").read_text().count("(deleted)")


def test_what_was_deleted_or_renamed_elsewhere_is_let_go_of(tmp_path: Path) -> None:
    """A tick later, no file or mapping of the topic is open, without any access by its name."""
    with segmentlog.open(tmp_path, background=False) as store, segmentlog.open(tmp_path, background=False) as other:
        kept = store.create_topic("kept").partition(0)
        kept.append([b"here"])
        kept.flush()  # for which it has a descriptor of its own
        gc.collect()  # of tests before
        before, maps = files_open_below(tmp_path), _deleted_maps()
        gone = []
        for number in range(5):
            log = store.create_topic(f"t{number}").partition(0)
            log.append([b"value"])
            assert len(list(log.read(0))) == 1
            gone.append(weakref.ref(log))
            del log
            if number % 2:
                other.delete_topic(f"t{number}")
            else:
                other.rename_topic(f"t{number}", f"u{number}")
        store._topics.background.flush_tick()
        gc.collect()
        assert [log() for log in gone] == [None] * 5
        assert files_open_below(tmp_path) == before
        assert _deleted_maps() <= maps
        assert [(log.topic, log.number) for log in store.opened_partitions()] == [("kept", 0)]
        assert [record.value for record in store.consumer("kept")] == [b"here"]
        assert [record.value for record in store.consumer("u0")] == [b"value"]
