"""What an inspection finds of one partition: for people as findings, for `repair` as what it has to know."""

from __future__ import annotations

import msgspec

from segmentlog.inspection.finding import Finding, Severity
from segmentlog.inspection.segment_inspection import SegmentFindings
from segmentlog.inspection.small_files import CheckpointFindings, StateFindings


class Cut(msgspec.Struct, frozen=True):
    """Bytes that `repair` cuts out of a segment, and the offsets that go with them.

    ``record_count``: of an unreadable batch, the records that its header announces; None of damaged bytes.
    """

    segment: int
    path: str
    position: int
    end_position: int
    base_offset: int
    end_offset: int
    why: str
    record_count: int | None = None


class Hole(msgspec.Struct, frozen=True):
    """Offsets that no batch has, and that nothing explains."""

    base_offset: int
    end_offset: int
    why: str


class BadCache(msgspec.Struct, frozen=True):
    """A ``.txnindex`` or ``.snapshot`` that `repair` removes."""

    path: str
    why: str


class OpenTransaction(msgspec.Struct, frozen=True):
    """A transaction that no marker has decided yet."""

    producer_id: int
    epoch: int
    first_offset: int


class PartitionFindings(msgspec.Struct):
    """A partition as it lies there: the findings, and what `repair` needs to know."""

    folder: str
    topic: str
    partition: int
    findings: list[Finding] = []
    producer_expiration_ms: int = 0
    """Of the topic: a log forgets a producer that no name holds once it has appended nothing for so long."""
    live: bool = False
    """Whether the state page says where the log ends."""
    checkpoint: CheckpointFindings = CheckpointFindings(None)
    state: StateFindings = StateFindings()
    segments: list[SegmentFindings] = []
    cuts: list[Cut] = []
    unreadable: list[Cut] = []
    """Batches that `repair` cuts out only if it is asked to: they are what was written."""
    holes: list[Hole] = []
    bad_indexes: list[int] = []
    bad_caches: list[BadCache] = []
    open_transactions: list[OpenTransaction] = []
    has_producers: bool = False
    """Whether there is a batch of a producer, or a snapshot that knows one."""
    has_aborts: bool = False
    """Whether a transaction was aborted, of which the log tells."""
    torn: Finding | None = None
    """Where the next open will end the log, when that is not where it was written to."""

    @property
    def is_damaged(self) -> bool:
        return any(finding.severity == "damage" for finding in self.findings)

    @property
    def is_unaware_of_producers(self) -> bool:
        """Whether the checkpoint says that there are none, and there are."""
        checkpoint = self.checkpoint.checkpoint
        if checkpoint is None or self.checkpoint.is_damaged:
            return False
        return self.has_producers and not checkpoint.has_producers

    def cut_unreadable(self) -> None:
        """Count the unreadable batches among what is to be cut out."""
        self.cuts = sorted([*self.cuts, *self.unreadable], key=lambda cut: (cut.segment, cut.position))

    def add(self, severity: Severity, path: str, what: str, position: int = -1, size: int = 0,
            base_offset: int = -1, end_offset: int = -1) -> Finding:  # fmt: skip
        finding = Finding(severity, path, what, position, size, base_offset, end_offset, self.topic, self.partition)
        self.findings.append(finding)
        return finding
