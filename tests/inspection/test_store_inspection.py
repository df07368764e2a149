"""Findings of a store inspection about files other than topics."""

from __future__ import annotations

from pathlib import Path

import segmentlog
from segmentlog.format import file_names
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.storage.network import NetworkMark


def test_nothing_is_said_of_the_files_of_a_store(tmp_path: Path) -> None:
    """The files that a store may have next to its topics, and their lock files, have no findings."""
    with segmentlog.open(tmp_path, background=False) as store:
        store.create_topic("t")
    own = {
        value
        for name, value in vars(file_names).items()
        if name.endswith("_FILE") and value.startswith(file_names.HIDDEN)
    }
    assert file_names.SCHEMAS_FILE in own
    for name in own - {file_names.CONFIGS_FILE, file_names.SHIP_FILE} | {
        NetworkMark.FILE
    }:  # the first belongs elsewhere, the second is read
        (tmp_path / name).touch()
    for name in (
        file_names.USERS_FILE,
        file_names.ACLS_FILE,
        file_names.SCHEMAS_FILE,
        file_names.PRODUCER_IDS_FILE,
        file_names.SHIP_FILE,
    ):
        (tmp_path / f"{name}{file_names.FILE_LOCK_SUFFIX}").touch()
    assert list(inspect_store(str(tmp_path))) == []
