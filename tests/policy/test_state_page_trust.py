"""The table of `policy.state_page_trust`, row by row."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from segmentlog.policy.state_page_trust import Evidence, distrust

SOUND = Evidence(
    is_about=True,
    same_memory=True,
    in_rewrite=False,
    is_appending=False,
    epoch=3,
    offset_ceiling=1000,
    checkpoint_epoch=3,
    checkpoint_ceiling=1000,
    end_position=500,
    file_bytes=4096,
    continues=False,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"is_about": False}, "another boot or folder"),
        ({"same_memory": False}, "may have been detached"),
        ({"epoch": 2}, "epoch 2, but the checkpoint has 3"),
        ({"epoch": 4}, "epoch 4, but the checkpoint has 3"),
        ({"offset_ceiling": 1001}, "offset ceiling 1001"),
        ({"offset_ceiling": 999}, None),  # a death between checkpoint and page
        ({"checkpoint_epoch": None, "checkpoint_ceiling": 0}, None),  # it was deleted; the page is all there is
        ({"file_bytes": 499}, "has 499 bytes"),
        ({"file_bytes": 500}, None),
        ({"file_bytes": -1}, "has -1 bytes"),
        ({"continues": True}, "continues after byte 500"),
        ({"continues": True, "is_appending": True}, None),  # written, and not published yet
        ({"in_rewrite": True, "epoch": 2, "offset_ceiling": 2000, "file_bytes": 0, "continues": True}, None),
        ({"in_rewrite": True, "same_memory": False}, "may have been detached"),
        ({"in_rewrite": True, "is_about": False}, "another boot or folder"),
    ],
)
def test_each_row(change: dict[str, object], expected: str | None) -> None:
    """A page that is not proven right is distrusted, with the reason; a running append or rewrite is no reason."""
    found = distrust(replace(SOUND, **change))
    assert found is None if expected is None else found is not None and expected in found
