"""Decide about a follower's fetch and its answer: what is confirmed, where two logs differ, where to truncate. Pure.

A follower fetches with the last epoch and the end of its log. The leader answers with records, or with the end of the
newest epoch that both logs may share, so that the follower truncates and asks again (KIP-595). `review_fetch` decides
at the leader, `review_answer` at the follower. `docs/replication-model.md` explains the rules R2, R9 and R10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from segmentlog.records import EpochStart, LostRange


class ReplicaId(NamedTuple):
    """A machine, and the incarnation of its data: the incarnation changes when confirmed data may be lost."""

    machine: str
    incarnation: str


class LogHistory(NamedTuple):
    """The shape of a log: its leader epochs, its lost ranges and its log end offset.

    An epoch starts at the first offset that its leader could assign. A lost range before that offset belongs to the
    epoch as well. A follower therefore records the epoch of a lost range together with the range.
    """

    epochs: Sequence[EpochStart]
    lost_ranges: Sequence[LostRange]
    log_end_offset: int

    @property
    def last_epoch(self) -> int:
        """The newest epoch of the log; -1 if it has none."""
        return self.epochs[-1].epoch if self.epochs else -1


class Confirmation(NamedTuple):
    """The state of a replica in one term: its confirmed offset, and the offset ceiling that it has on disk."""

    term: int
    confirmed_offset: int
    offset_ceiling: int


class ReplicaFetch(NamedTuple):
    """A follower's fetch: it asks for the records from its log end on, and reports what it has."""

    replica: ReplicaId
    term: int
    last_epoch: int
    log_end_offset: int
    confirmed_offset: int
    offset_ceiling: int


class EpochEnd(NamedTuple):
    """The newest epoch of the leader's log that is not newer than the requested epoch, and its end offset."""

    epoch: int
    end_offset: int


class FetchVerdict(NamedTuple):
    """A leader's decision about a fetch.

    A fetch of a wrong term has neither a confirmation nor a divergence.
    """

    confirmation: Confirmation | None
    """Counts from now on for this replica."""
    divergence: EpochEnd | None
    """The answer to a follower whose log differs."""
    newer_term: int | None
    """The term of the fetch if it is higher: the leader steps down."""
    reason: str


class AnswerVerdict(NamedTuple):
    """A follower's decision about an answer: append its records, truncate to an offset, or ignore it (neither)."""

    appends: bool
    truncate_to: int | None
    reason: str


class HighWatermark(NamedTuple):
    """A high watermark, and the term of the leader that reported it."""

    term: int
    offset: int


def confirmed_offset(log_end_offset: int, durable_offset: int, *, confirms_unsynced: bool) -> int:
    """Return the offset below which a replica confirms: synced records only, except in the mode ``written``."""
    return log_end_offset if confirms_unsynced else durable_offset


def end_of_epoch(history: LogHistory, epoch: int) -> EpochEnd:
    """Return where an epoch ends in a log; epoch -1 and the log's start if all its epochs are newer.

    The end is before the lost range with which the next epoch begins (`LogHistory`).
    """
    found, end_offset = -1, history.log_end_offset
    for start in history.epochs:
        if start.epoch > epoch:
            end_offset = start.start_offset
            break
        found = start.epoch
    else:
        return EpochEnd(found, end_offset)
    for lost in reversed(history.lost_ranges):
        if lost.base_offset < end_offset <= lost.end_offset and lost.epoch > epoch:
            end_offset = lost.base_offset
    return EpochEnd(found, end_offset)


def truncate_history(history: LogHistory, offset: int) -> LogHistory:
    """Return the history of a log of which only the offsets below ``offset`` are left.

    An epoch remains if it has a record or a part of a lost range there; so does the first epoch of the log.
    """
    lost_ranges = [
        lost if lost.end_offset <= offset else replace(lost, end_offset=offset)
        for lost in history.lost_ranges
        if lost.base_offset < offset
    ]
    begun = {lost.epoch for lost in lost_ranges}
    epochs = [
        start if start.start_offset <= offset else replace(start, start_offset=offset)
        for at, start in enumerate(history.epochs)
        if start.start_offset < offset or start.epoch in begun or not at
    ]
    return LogHistory(tuple(epochs), tuple(lost_ranges), min(history.log_end_offset, offset))


def review_fetch(term: int, history: LogHistory, fetch: ReplicaFetch, known: Confirmation | None) -> FetchVerdict:
    """Decide a fetch at the leader of ``term`` (R9, R10). ``known`` is the replica's confirmation until now.

    A fetch from a log that differs from the leader's confirms nothing. Late fetches of a term never lower what an
    earlier one confirmed.
    """
    if fetch.term != term:
        newer = fetch.term if fetch.term > term else None
        return FetchVerdict(None, None, newer, f"the fetch is of term {fetch.term}, and not {term}")
    end = end_of_epoch(history, fetch.last_epoch)
    if end.epoch < fetch.last_epoch or end.end_offset < fetch.log_end_offset:
        return FetchVerdict(None, end, None, f"the logs are equal in epoch {end.epoch} up to {end.end_offset} at most")
    confirmed, ceiling = fetch.confirmed_offset, fetch.offset_ceiling
    if known is not None and known.term == term:
        confirmed, ceiling = max(confirmed, known.confirmed_offset), max(ceiling, known.offset_ceiling)
    return FetchVerdict(Confirmation(term, confirmed, ceiling), None, None, f"confirms {confirmed}")


def is_current_answer(replica: ReplicaId, term: int, history: LogHistory, fetch: ReplicaFetch) -> bool:
    """Return whether an answer still applies: the replica would send the same question now (R10)."""
    question = (replica, term, history.last_epoch, history.log_end_offset)
    return question == (fetch.replica, fetch.term, fetch.last_epoch, fetch.log_end_offset)


def review_answer(
    replica: ReplicaId, term: int, history: LogHistory, known: HighWatermark, forced_term: int,
    fetch: ReplicaFetch, divergence: EpochEnd | None,
) -> AnswerVerdict:  # fmt: skip
    """Decide at a follower about the answer to ``fetch``: append, truncate, or ignore (R10).

    ``term`` is the follower's own. ``known`` is its high watermark. A truncation never goes below it, except after a
    newer ``forced_term`` in the document: a forced leader may lack records below it. ``divergence`` is the answer of a
    leader whose log differs; None if the answer has records.
    """
    if not is_current_answer(replica, term, history, fetch):
        return AnswerVerdict(False, None, "the answer is to a question about another log end or term")
    if divergence is None:
        return AnswerVerdict(True, None, "the records continue the log")
    end = end_of_epoch(history, divergence.epoch)
    truncate_to = min(end.end_offset, divergence.end_offset)
    if truncate_to < known.offset and forced_term <= known.term:
        reason = f"the leader lacks records below the high watermark {known.offset}, from {truncate_to} on"
        return AnswerVerdict(False, None, reason)
    return AnswerVerdict(False, truncate_to, f"the logs differ after epoch {end.epoch} and offset {truncate_to}")


def learn_high_watermark(known: HighWatermark, reported: HighWatermark, log_end_offset: int) -> HighWatermark:
    """Return the high watermark that a follower knows after an answer: it never falls, and ends at the log end."""
    offset = min(reported.offset, log_end_offset)
    return HighWatermark(reported.term, offset) if offset >= known.offset else known


def limit_high_watermark(known: HighWatermark, log_end_offset: int) -> HighWatermark:
    """Return the high watermark that a machine knows after a truncation or a crash.

    A new leader calls it with its confirmed offset: a forced leader may know more than it has synced.
    It keeps its term, even if a later forced term caused the truncation: the rest of the log may differ as well.
    """
    return HighWatermark(known.term, min(known.offset, log_end_offset))
