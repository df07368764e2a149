"""The end offset and epoch of a recovered log: every row of the decision table, and rules for all rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from segmentlog.format.checkpoint import RESTORED, Checkpoint
from segmentlog.policy.recovery_policy import UNKNOWN_CEILING_GAP, RecoveryVerdict, decide
from segmentlog.records import EpochStart

GAP = UNKNOWN_CEILING_GAP


def checkpoint(recovery_offset: int, ceiling: int, *, clean: bool, epoch: int = 3) -> Checkpoint:
    """Return a checkpoint of a log in this epoch."""
    epochs = (EpochStart(0, 0), EpochStart(epoch, 10))
    return Checkpoint(recovery_offset=recovery_offset, offset_ceiling=ceiling, clean=clean, epochs=epochs)


CLEAN = checkpoint(100, 100, clean=True)
UNCLEAN = checkpoint(100, 500, clean=False)

RESTORED_LOG = structs.replace(UNCLEAN, boot_id=RESTORED)

ROWS = [
    ("restored, some may be missing", RESTORED_LOG, False, True, 100, 3, 500, 3 + 1024, "object store; the owner"),
    (
        "restored, all of it",
        structs.replace(RESTORED_LOG, offset_ceiling=100),
        False,
        True,
        100,
        3,
        100,
        1027,
        "restored",
    ),
    ("restored, one slot damaged", RESTORED_LOG, True, True, 100, 3, 500 + GAP, 4, "one slot"),
    # name, checkpoint, one slot damaged, has segments, end, highest epoch -> resume, epoch, part of the reason
    ("new", None, False, False, 0, 0, 0, 0, "new"),
    ("checkpoint gone", None, False, True, 70, 5, 70 + GAP, 6, "missing or damaged"),
    ("checkpoint gone, log empty", None, False, True, 0, 0, GAP, 1, "missing or damaged"),
    ("both slots damaged", None, True, True, 70, 5, 70 + GAP, 6, "missing or damaged"),
    ("both slots damaged, no segment", None, True, False, 0, 0, GAP, 1, "missing or damaged"),
    ("clean", CLEAN, False, True, 100, 3, 100, 3, "cleanly"),
    ("clean, nothing ever appended", checkpoint(0, 0, clean=True), False, True, 0, 0, 0, 3, "cleanly"),
    ("clean, but records are gone", CLEAN, False, True, 60, 3, 100, 4, "ceiling 100"),
    ("clean, but all segments are gone", CLEAN, False, False, 100, 3, 100, 3, "cleanly"),
    ("clean, but records came after it", CLEAN, False, True, 130, 3, 130 + GAP, 4, "beyond the checkpoint's"),
    (
        "clean, a ceiling above its end",
        checkpoint(100, 500, clean=True),
        False,
        True,
        100,
        3,
        500,
        4,
        "ceiling 500",
    ),
    ("unclean, all survived", UNCLEAN, False, True, 500, 3, 500, 4, "survived"),
    ("unclean, nothing was handed out", checkpoint(100, 100, clean=False), False, True, 100, 3, 100, 4, "survived"),
    ("unclean, some may be lost", UNCLEAN, False, True, 499, 3, 500, 4, "ceiling 500"),
    ("unclean, nothing above the point", UNCLEAN, False, True, 100, 3, 500, 4, "ceiling 500"),
    ("unclean, end beyond the ceiling", UNCLEAN, False, True, 501, 3, 501 + GAP, 4, "beyond the checkpoint's"),
    ("unclean, the log knows a newer epoch", UNCLEAN, False, True, 300, 9, 500, 10, "ceiling 500"),
    ("one slot damaged, end below the ceiling", UNCLEAN, True, True, 300, 3, 500 + GAP, 4, "one slot"),
    ("one slot damaged, end beyond the ceiling", UNCLEAN, True, True, 700, 3, 700 + GAP, 4, "one slot"),
    ("one slot damaged, the other clean", CLEAN, True, True, 100, 3, 100 + GAP, 4, "one slot"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_of_the_table(row):
    """Each kind of evidence leads to its verdict: the resume offset, the epoch, and the reason."""
    _, known, slot_damaged, has_segments, end_offset, last_epoch, resume_offset, epoch, why = row
    verdict = decide(
        known, slot_damaged=slot_damaged, has_segments=has_segments, end_offset=end_offset, last_epoch=last_epoch
    )
    assert (verdict.resume_offset, verdict.epoch) == (resume_offset, epoch)
    assert why in verdict.why


small = st.integers(0, 200)
checkpoints = st.builds(lambda at, more, clean: checkpoint(at, at + more, clean=clean), small, small, st.booleans())


@given(
    known=st.none() | checkpoints,
    slot_damaged=st.booleans(),
    has_segments=st.booleans(),
    end_offset=small,
    last_epoch=st.integers(0, 9),
)
def test_no_offset_is_ever_handed_out_twice(known, slot_damaged, has_segments, end_offset, last_epoch):
    """With any evidence, the log resumes at or after all offsets that may have been assigned.

    It begins a new epoch unless certainly no record was lost.
    """
    if not has_segments and known is None:
        end_offset = 0  # nothing to scan
    verdict: RecoveryVerdict = decide(
        known, slot_damaged=slot_damaged, has_segments=has_segments, end_offset=end_offset, last_epoch=last_epoch
    )
    assert verdict.resume_offset >= end_offset
    ceiling_is_known = known is not None and not slot_damaged and end_offset <= known.offset_ceiling
    if ceiling_is_known:
        assert verdict.resume_offset == known.offset_ceiling
    elif verdict.resume_offset != 0:
        assert verdict.resume_offset >= end_offset + GAP
    else:
        assert (known, slot_damaged, has_segments) == (None, False, False)
    if verdict.resume_offset > end_offset:
        assert verdict.epoch > max(last_epoch, known.epoch if known else -1)
    assert verdict.epoch >= (known.epoch if known else 0)
