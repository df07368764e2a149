"""What an inspection of a whole store says of the files beside its topics."""

from __future__ import annotations

from pathlib import Path

import segmentlog
from segmentlog.format import names
from segmentlog.inspection.store import inspect_store
from segmentlog.storage.network import NetworkMark


def test_nothing_is_said_of_the_files_of_a_store(tmp_path: Path) -> None:
    """Each one that it may have beside its topics, and those that are locked beside them."""
    with segmentlog.open(tmp_path, background=False) as store:
        store.create_topic("t")
    own = {value for name, value in vars(names).items() if name.endswith("_FILE") and value.startswith(names.HIDDEN)}
    assert names.SCHEMAS_FILE in own
    for name in own - {names.CONFIGS_FILE, names.SHIP_FILE} | {NetworkMark.FILE}:  # one is elsewhere, one is looked at
        (tmp_path / name).touch()
    for name in (names.USERS_FILE, names.ACLS_FILE, names.SCHEMAS_FILE, names.PRODUCER_IDS_FILE, names.SHIP_FILE):
        (tmp_path / f"{name}{names.FILE_LOCK_SUFFIX}").touch()
    assert list(inspect_store(str(tmp_path))) == []
