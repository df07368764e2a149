"""``segmentlog compact``: one pass of compaction now, or what it would save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from segmentlog.cli.common import (
    Failures,
    Patience,
    Progress,
    Stop,
    open_store,
    say,
    status_of,
    stoppable,
    stopped_by,
)
from segmentlog.cli.compaction_stats import grouping, show_groups
from segmentlog.cli.option_types import SELECTOR, SIZE, Selector, chosen_partitions, json_option
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.records import CompactionReport, SegmentInfo
    from segmentlog.store import LogStore, Topic
    from segmentlog.tables.key_statistics import GroupOf

_READS_OF_A_PASS = 3
"""A pass reads what it cleans at least once, and tells of what it copies twice more. For the bar only."""
_READS_OF_STATISTICS = 2
_SLEEP_MAX_S = 0.2
"""A signal ends a sleep no sooner."""


@click.command()
@click.argument("topic", type=SELECTOR, required=False, metavar="[TOPIC[/PARTITION]]")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option("--buffer", "buffer_bytes", type=SIZE, default="128MiB", show_default=True, metavar="SIZE",
              help="Memory for the map of keys (cleaner.dedupe.buffer.bytes); more passes with less.")  # fmt: skip
@click.option("--max-rate", type=SIZE, metavar="SIZE",
              help="Read and write so much a second (cleaner.io.max.bytes.per.second).")  # fmt: skip
@click.option(
    "--stats", is_flag=True, help="Show what a pass would save, by what the keys begin with; changes nothing."
)
@click.option("--prefix-separator", metavar="TEXT", help="With --stats: a prefix ends before the first of these (:).")
@click.option("--prefix-length", type=click.IntRange(0), metavar="N", help="With --stats: a prefix is N bytes long.")
@click.option("-n", "--rows", type=click.IntRange(1), default=20, show_default=True,
              help="With --stats: show so many prefixes of each topic.")  # fmt: skip
@json_option
@click.pass_context
def compact(
    ctx: click.Context,
    topic: Selector | None,
    dry_run: bool,
    buffer_bytes: int,
    max_rate: int | None,
    stats: bool,
    prefix_separator: str | None,
    prefix_length: int | None,
    rows: int,
    as_json: bool,
) -> int:
    """Keep the last records of each key, of TOPIC or of all compacted topics, now.

    Whatever the dirty ratio is; offsets do not change. The active segment is never compacted.
    A signal ends the pass between two batches: what was compacted stays so, and the next pass
    goes on from there. The store's own topics are included only when they are named.
    """
    if buffer_bytes < 1:
        raise click.UsageError("--buffer: a number of bytes from 1 on, as in 128MiB")
    if max_rate == 0:
        raise click.UsageError("--max-rate: a number of bytes from 1 on, as in 10MiB")
    if not stats and (prefix_separator is not None or prefix_length is not None):
        raise click.UsageError("--prefix-separator and --prefix-length are for --stats")
    group_of = grouping(prefix_separator, prefix_length) if stats else None
    changes = not (dry_run or stats)
    with stoppable() as stopped, open_store(ctx, read_only=not changes, background=False) as store:
        partitions = _compacted_partitions(store, topic)
        if not partitions:
            say("there are no compacted topics; make one with 'segmentlog create TOPIC --cleanup-policy compact'")
            return status_of(stopped)
        if changes:
            store.check_writable("compact")
        with Progress("bytes", None) as progress:
            work = _Work(progress, _Pace(progress, max_rate, stopped), stopped, buffer_bytes)
            logs = work.open(partitions, _READS_OF_STATISTICS if stats else _READS_OF_A_PASS)
            if group_of is not None:
                return work.show_statistics(logs, group_of, rows, as_json)
            return work.compact(logs, dry_run, as_json)


def _compacted_partitions(store: LogStore, selector: Selector | None) -> list[tuple[Topic, int]]:
    """Those that are chosen and compacted. Raises ClickException for a topic that is named and is not."""
    chosen = chosen_partitions(store, selector)
    compacted = [(topic, number) for topic, number in chosen if topic.config.compacts]
    if compacted or not chosen:
        return compacted
    if selector is not None and not selector.has_pattern:
        topic = chosen[0][0]
        policy = topic.config.cleanup_policy or "none"
        raise click.ClickException(
            f"topic {topic.name!r} is not compacted (cleanup.policy = {policy}); to have it so:"
            f" segmentlog alter {topic.name} -c cleanup.policy=compact"
        )
    return []


def _sealed_bytes(log: Partition) -> int:
    return sum(segment.size_bytes for segment in log.segments() if not segment.active)


class _Pace:
    """What a pass tells its bytes: moves the bar, keeps to the rate, and raises `Stop` after a signal."""

    def __init__(self, progress: Progress, max_rate: int | None, stopped: list[int]) -> None:
        from segmentlog.topics.compaction_scheduler import Throttle

        self._progress = progress
        self._throttle = Throttle(max_rate if max_rate is not None and max_rate > 0 else None)
        self._stopped = stopped
        self._told_bytes = 0

    def __call__(self, size_bytes: int) -> None:
        self._told_bytes += size_bytes
        self._progress.advance(size_bytes)
        ends = time.monotonic() + self._throttle.wait_s(size_bytes)
        while not self._stopped and (left_s := ends - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLEEP_MAX_S))
        if self._stopped:
            raise Stop

    def end(self, expected_bytes: int) -> None:
        """A partition is done: the bar moves on by what was expected of it and did not come."""
        self._progress.advance(max(expected_bytes - self._told_bytes, 0))
        self._told_bytes = 0


class _Work:
    """What the command does with the partitions, and how it ended."""

    def __init__(self, progress: Progress, pace: _Pace, stopped: list[int], buffer_bytes: int) -> None:
        self._progress = progress
        self._pace = pace
        self._stopped = stopped
        self._buffer_bytes = buffer_bytes
        self._expected_bytes: dict[Partition, int] = {}
        self._failures = Failures()

    def open(self, partitions: list[tuple[Topic, int]], reads: int) -> list[Partition]:
        """Those that open. ``reads``: how often the work tells each sealed byte, for the bar."""
        for topic, number in partitions:
            with self._failures.noted(f"{topic.name}/{number}", self._progress):
                log = topic.partition(number)
                self._expected_bytes[log] = reads * _sealed_bytes(log)
        self._progress.expect(sum(self._expected_bytes.values()))
        return list(self._expected_bytes.copy())

    def _until_stopped(self, logs: list[Partition]) -> Iterator[Partition]:
        for log in logs:
            if self._stopped:
                return
            yield log
            self._pace.end(self._expected_bytes[log])

    # ------------------------------------------------------------ compacting

    def compact(self, logs: list[Partition], dry_run: bool, as_json: bool) -> int:
        """A pass over each; the exit status."""
        patience = Patience(self._stopped)
        reports: list[CompactionReport] = []
        for log in self._until_stopped(logs):
            name = f"{log.topic}/{log.number}"
            with self._failures.noted(name, self._progress):
                before = log.segments()
                try:
                    report = patience.with_(
                        partial(log.compact, dry_run=dry_run, buffer_bytes=self._buffer_bytes, pace=self._pace)
                    )
                except Stop:
                    with self._progress.hidden():
                        _tell_stopped(log, before, dry_run, as_json)
                    break
                if report.busy:
                    self._failures.busy(name)
                    continue
                reports.append(report)
                with self._progress.hidden():
                    _tell(report, dry_run, as_json)
        with self._progress.hidden():
            say(_summary(reports, dry_run) + stopped_by(self._stopped))
        return self._failures.status(self._stopped)

    # ------------------------------------------------------------ statistics

    def show_statistics(self, logs: list[Partition], group_of: GroupOf, rows: int, as_json: bool) -> int:
        """What a pass would save, topic by topic; the exit status."""
        from segmentlog.tables.key_statistics import KeyStatistics

        topics: dict[str, KeyStatistics] = {}
        now_ms = time.time_ns() // 1_000_000
        for log in self._until_stopped(logs):
            statistics = topics.setdefault(
                log.topic, KeyStatistics(group_of, buffer_bytes=self._buffer_bytes, pace=self._pace)
            )
            with self._failures.noted(f"{log.topic}/{log.number}", self._progress), contextlib.suppress(Stop):
                statistics.count(log, now_ms)
        with self._progress.hidden():
            if self._stopped:
                say(f"nothing is shown of what was counted in part{stopped_by(self._stopped)}")
            else:
                for topic, one in topics.items():
                    show_groups(topic, one.groups, one.total(), rows, as_json, len(one.unreadable))
                    for (number, _), why in sorted(one.unreadable.items()):
                        say(f"{topic}/{number}: not counted, and kept as it is: {why}")
        return self._failures.status(self._stopped)


# ---------------------------------------------------------------- telling


def _tell(report: CompactionReport, dry_run: bool, as_json: bool) -> None:
    name = f"{report.topic}/{report.partition}"
    if as_json:
        import msgspec

        fields = msgspec.structs.asdict(report)
        del fields["topic"], fields["busy"]
        show_json({**fields, "partition": name, "stopped": False, "dry_run": dry_run})
        return
    if not report.segments_before:
        click.echo(f"{name}: nothing to compact: no sealed segment")
        return
    keyless = f", {report.keyless} without a key stay" if report.keyless else ""
    click.echo(
        f"{name}: {report.records_before} -> {report.records_after} records,"
        f" {report.bytes_before} -> {report.bytes_after} bytes,"
        f" {report.segments_before} -> {report.segments_after} segments,"
        f" {report.tombstones_removed} tombstones removed, {report.expired} expired{keyless},"
        f" {report.passes} {'pass' if report.passes == 1 else 'passes'}, {report.seconds:.2f} s"
    )
    for why in report.unreadable:
        click.echo(f"{name}: kept as it is: {why}")


def _tell_stopped(log: Partition, before: list[SegmentInfo], dry_run: bool, as_json: bool) -> None:
    """How far a pass came that a signal ended: it tells nothing itself, but the segments do."""
    name = f"{log.topic}/{log.number}"
    after = log.segments()
    size_before, size_after = (sum(one.size_bytes for one in segments) for segments in (before, after))
    if as_json:
        show_json(
            {
                "cleaned_offset": log.cleaned_offset,
                "segments_before": len(before),
                "segments_after": len(after),
                "bytes_before": size_before,
                "bytes_after": size_after,
                "partition": name,
                "stopped": True,
                "dry_run": dry_run,
            }
        )
        return
    click.echo(
        f"{name}: stopped; {size_before} -> {size_after} bytes, {len(before)} -> {len(after)} segments so far,"
        f" clean up to offset {log.cleaned_offset}"
    )


def _summary(reports: list[CompactionReport], dry_run: bool) -> str:
    records = (sum(one.records_before for one in reports), sum(one.records_after for one in reports))
    size = (sum(one.bytes_before for one in reports), sum(one.bytes_after for one in reports))
    saved = f" ({1 - size[1] / size[0]:.0%} less)" if size[0] else ""
    seconds = sum(one.seconds for one in reports)
    return (
        f"{len(reports):,} partitions{' would be' if dry_run else ''} compacted: {records[0]:,} -> {records[1]:,}"
        f" records, {size[0]:,} -> {size[1]:,} bytes{saved} in {seconds:.2f} s"
    )
