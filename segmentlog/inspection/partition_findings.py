"""The result of inspecting a partition: findings for users, and the facts that `repair` needs."""

from __future__ import annotations

import msgspec

from segmentlog.inspection.finding import Finding, Severity
from segmentlog.inspection.segment_inspection import SegmentFindings
from segmentlog.inspection.small_files import CheckpointFindings, StateFindings


class Cut(msgspec.Struct, frozen=True):
    """Bytes that `repair` cuts out of a segment, and their offsets.

    ``record_count`` is the number of records in the header of an unreadable batch; None for damaged bytes.
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
    """Offsets outside all batches and all lost ranges."""

    base_offset: int
    end_offset: int
    why: str


class BadCache(msgspec.Struct, frozen=True):
    """A ``.txnindex`` or ``.snapshot`` file that `repair` deletes."""

    path: str
    why: str


class OpenTransaction(msgspec.Struct, frozen=True):
    """A transaction that no marker has decided yet."""

    producer_id: int
    epoch: int
    first_offset: int


class PartitionFindings(msgspec.Struct):
    """The findings of one partition, and the facts that `repair` needs."""

    folder: str
    topic: str
    partition: int
    findings: list[Finding] = []
    producer_expiration_ms: int = 0
    """The topic's setting: the log forgets an idle producer after this time, unless a name owns its id."""
    live: bool = False
    """Whether the state page is trusted, and so defines the log end."""
    checkpoint: CheckpointFindings = CheckpointFindings(None)
    state: StateFindings = StateFindings()
    segments: list[SegmentFindings] = []
    cuts: list[Cut] = []
    unreadable: list[Cut] = []
    """Intact batches that do not decode: `repair` cuts them out only on request."""
    holes: list[Hole] = []
    bad_indexes: list[int] = []
    bad_caches: list[BadCache] = []
    open_transactions: list[OpenTransaction] = []
    has_producers: bool = False
    """Whether there is a batch with a producer id, or a snapshot with one."""
    has_aborts: bool = False
    """Whether the log records an aborted transaction."""
    torn: Finding | None = None
    """The finding that the next open will end the log before the end of the written bytes, if it will."""

    @property
    def is_damaged(self) -> bool:
        return any(finding.severity == "damage" for finding in self.findings)

    @property
    def is_unaware_of_producers(self) -> bool:
        """Whether the checkpoint says that the log has no producers, although it has."""
        checkpoint = self.checkpoint.checkpoint
        if checkpoint is None or self.checkpoint.is_damaged:
            return False
        return self.has_producers and not checkpoint.has_producers

    def cut_unreadable(self) -> None:
        """Add the unreadable batches to the cuts."""
        self.cuts = sorted([*self.cuts, *self.unreadable], key=lambda cut: (cut.segment, cut.position))

    def add(self, severity: Severity, path: str, what: str, position: int = -1, size: int = 0,
            base_offset: int = -1, end_offset: int = -1) -> Finding:  # fmt: skip
        finding = Finding(severity, path, what, position, size, base_offset, end_offset, self.topic, self.partition)
        self.findings.append(finding)
        return finding
