"""The table of `policy.state_page_trust`, row by row."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from segmentlog.policy.state_page_trust import Evidence, doubt

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
    goes_on=False,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"is_about": False}, "another boot or folder"),
        ({"same_memory": False}, "may have gone and come back"),
        ({"epoch": 2}, "of epoch 2, the checkpoint of 3"),
        ({"epoch": 4}, "of epoch 4, the checkpoint of 3"),
        ({"offset_ceiling": 1001}, "offsets up to 1001"),
        ({"offset_ceiling": 999}, None),  # a death between checkpoint and page
        ({"checkpoint_epoch": None, "checkpoint_ceiling": 0}, None),  # it was deleted; the page is all there is
        ({"file_bytes": 499}, "has 499 bytes"),
        ({"file_bytes": 500}, None),
        ({"file_bytes": -1}, "has -1 bytes"),
        ({"goes_on": True}, "goes on behind byte 500"),
        ({"goes_on": True, "is_appending": True}, None),  # written, and not published yet
        ({"in_rewrite": True, "epoch": 2, "offset_ceiling": 2000, "file_bytes": 0, "goes_on": True}, None),
        ({"in_rewrite": True, "same_memory": False}, "may have gone and come back"),
        ({"in_rewrite": True, "is_about": False}, "another boot or folder"),
    ],
)
def test_each_row(change: dict[str, object], expected: str | None) -> None:
    """What is not proven is doubted, with the reason; what may be halfway is not held against a page."""
    found = doubt(replace(SOUND, **change))
    assert found is None if expected is None else found is not None and expected in found
