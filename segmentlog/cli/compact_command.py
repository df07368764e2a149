"""``segmentlog compact``: run one compaction pass now, or show what it would remove."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from segmentlog.cli.common import (
    BusyRetry,
    PartitionErrors,
    Progress,
    StopRequested,
    collect_signals,
    describe_stop,
    find_exit_status,
    open_store,
    say,
)
from segmentlog.cli.compaction_stats import choose_grouping, show_groups
from segmentlog.cli.option_types import SELECTOR, SIZE, Selector, json_option, match_partitions
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.records import CompactionReport, SegmentInfo
    from segmentlog.store import LogStore, Topic
    from segmentlog.tables.key_statistics import GroupOf

_READS_OF_A_PASS = 3
"""A pass reads what it cleans at least once, and reports copied bytes twice more. For the progress bar only."""
_READS_OF_STATISTICS = 2
_SLEEP_MAX_S = 0.2
"""Longest sleep: a signal is handled after this time."""


@click.command()
@click.argument("topic", type=SELECTOR, required=False, metavar="[TOPIC[/PARTITION]]")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and change nothing.")
@click.option("--buffer", "buffer_bytes", type=SIZE, default="128MiB", show_default=True, metavar="SIZE",
              help="Memory for the map of keys (cleaner.dedupe.buffer.bytes). Less memory means more"
                   " passes.")  # fmt: skip
@click.option("--max-rate", type=SIZE, metavar="SIZE",
              help="Limit reads and writes to SIZE bytes per second (cleaner.io.max.bytes.per.second).")  # fmt: skip
@click.option("--stats", is_flag=True, help="Show what a pass would remove, grouped by key prefix; change nothing.")
@click.option(
    "--prefix-separator", metavar="TEXT", help="With --stats: a prefix ends before the first TEXT in the key (:)."
)
@click.option("--prefix-length", type=click.IntRange(0), metavar="N", help="With --stats: a prefix is N bytes long.")
@click.option("-n", "--rows", type=click.IntRange(1), default=20, show_default=True,
              help="With --stats: show this many prefixes of each topic.")  # fmt: skip
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
    """Keep only the last record of each key, now, in TOPIC or in all compacted topics.

    Ignores the dirty ratio. Offsets do not change. The active segment is never compacted. A signal ends the pass
    between two batches: finished segments stay compacted, and the next pass continues from there. Internal topics of
    the store are compacted only if you name them.
    """
    if buffer_bytes < 1:
        raise click.UsageError("--buffer: give at least 1 byte, such as 128MiB")
    if max_rate == 0:
        raise click.UsageError("--max-rate: give at least 1 byte, such as 10MiB")
    if not stats and (prefix_separator is not None or prefix_length is not None):
        raise click.UsageError("--prefix-separator and --prefix-length need --stats")
    group_of = choose_grouping(prefix_separator, prefix_length) if stats else None
    changes = not (dry_run or stats)
    with collect_signals() as stopped, open_store(ctx, read_only=not changes, background=False) as store:
        partitions = _compacted_partitions(store, topic)
        if not partitions:
            say("there are no compacted topics; create one with 'segmentlog create TOPIC --cleanup-policy compact'")
            return find_exit_status(stopped)
        if changes:
            store.check_writable("compact")
        with Progress("bytes", None) as progress:
            work = _Compaction(progress, _PassPace(progress, max_rate, stopped), stopped, buffer_bytes)
            logs = work.open(partitions, _READS_OF_STATISTICS if stats else _READS_OF_A_PASS)
            if group_of is not None:
                return work.show_statistics(logs, group_of, rows, as_json)
            return work.compact(logs, dry_run, as_json)


def _compacted_partitions(store: LogStore, selector: Selector | None) -> list[tuple[Topic, int]]:
    """Return the chosen partitions that are compacted. Raises ClickException if a named topic is not compacted."""
    chosen = match_partitions(store, selector)
    compacted = [(topic, number) for topic, number in chosen if topic.config.compacts]
    if compacted or not chosen:
        return compacted
    if selector is not None and not selector.has_pattern:
        topic = chosen[0][0]
        policy = topic.config.cleanup_policy or "none"
        raise click.ClickException(
            f"topic {topic.name!r} is not compacted (cleanup.policy = {policy}); to enable compaction:"
            f" segmentlog alter {topic.name} -c cleanup.policy=compact"
        )
    return []


def _sealed_bytes(log: Partition) -> int:
    return sum(segment.size_bytes for segment in log.segments() if not segment.active)


class _PassPace:
    """Callback for processed bytes: moves the bar, limits the rate, raises `StopRequested` after a signal."""

    def __init__(self, progress: Progress, max_rate: int | None, stopped: list[int]) -> None:
        from segmentlog.topics.compaction_scheduler import Throttle

        self._progress = progress
        self._throttle = Throttle(max_rate if max_rate is not None and max_rate > 0 else None)
        self._stopped = stopped
        self._reported_bytes = 0

    def __call__(self, size_bytes: int) -> None:
        self._reported_bytes += size_bytes
        self._progress.advance(size_bytes)
        ends = time.monotonic() + self._throttle.wait_s(size_bytes)
        while not self._stopped and (left_s := ends - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLEEP_MAX_S))
        if self._stopped:
            raise StopRequested

    def end(self, expected_bytes: int) -> None:
        """Finish a partition: advance the bar to the expected bytes, because a pass may skip some of them."""
        self._progress.advance(max(expected_bytes - self._reported_bytes, 0))
        self._reported_bytes = 0


class _Compaction:
    """One run of `compact` over the chosen partitions; it counts their errors."""

    def __init__(self, progress: Progress, pace: _PassPace, stopped: list[int], buffer_bytes: int) -> None:
        self._progress = progress
        self._pace = pace
        self._stopped = stopped
        self._buffer_bytes = buffer_bytes
        self._expected_bytes: dict[Partition, int] = {}
        self._failures = PartitionErrors()

    def open(self, partitions: list[tuple[Topic, int]], reads: int) -> list[Partition]:
        """Open the partitions, and return those that could be opened. Sets the total of the progress bar.

        ``reads`` is the number of times that the pass counts each byte of a sealed segment in its progress.
        """
        for topic, number in partitions:
            with self._failures.collecting(f"{topic.name}/{number}", self._progress):
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
        """Compact each partition, and return the exit status."""
        retry = BusyRetry(self._stopped)
        reports: list[CompactionReport] = []
        for log in self._until_stopped(logs):
            name = f"{log.topic}/{log.number}"
            with self._failures.collecting(name, self._progress):
                before = log.segments()
                try:
                    report = retry.run(
                        partial(log.compact, dry_run=dry_run, buffer_bytes=self._buffer_bytes, pace=self._pace)
                    )
                except StopRequested:
                    with self._progress.hidden():
                        _print_stopped(log, before, dry_run, as_json)
                    break
                if report.busy:
                    self._failures.add_busy(name)
                    continue
                reports.append(report)
                with self._progress.hidden():
                    _print_report(report, dry_run, as_json)
        with self._progress.hidden():
            say(_summary(reports, dry_run) + describe_stop(self._stopped))
        return self._failures.exit_status(self._stopped)

    # ------------------------------------------------------------ statistics

    def show_statistics(self, logs: list[Partition], group_of: GroupOf, rows: int, as_json: bool) -> int:
        """Print for each topic what a pass would remove, and return the exit status."""
        from segmentlog.tables.key_statistics import KeyStatistics

        topics: dict[str, KeyStatistics] = {}
        now_ms = time.time_ns() // 1_000_000
        for log in self._until_stopped(logs):
            statistics = topics.setdefault(
                log.topic, KeyStatistics(group_of, buffer_bytes=self._buffer_bytes, pace=self._pace)
            )
            with (
                self._failures.collecting(f"{log.topic}/{log.number}", self._progress),
                contextlib.suppress(StopRequested),
            ):
                statistics.count(log, now_ms)
        with self._progress.hidden():
            if self._stopped:
                say(f"statistics are incomplete and not shown{describe_stop(self._stopped)}")
            else:
                for topic, topic_statistics in topics.items():
                    unreadable = topic_statistics.unreadable
                    show_groups(
                        topic, topic_statistics.groups, topic_statistics.total(), rows, as_json, len(unreadable)
                    )
                    for (number, _), why in sorted(unreadable.items()):
                        say(f"{topic}/{number}: not counted, and left unchanged: {why}")
        return self._failures.exit_status(self._stopped)


# ---------------------------------------------------------------- printing


def _print_report(report: CompactionReport, dry_run: bool, as_json: bool) -> None:
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
    keyless = f", {report.keyless} without a key kept" if report.keyless else ""
    click.echo(
        f"{name}: {report.records_before} -> {report.records_after} records,"
        f" {report.bytes_before} -> {report.bytes_after} bytes,"
        f" {report.segments_before} -> {report.segments_after} segments,"
        f" {report.tombstones_removed} tombstones removed, {report.expired} expired{keyless},"
        f" {report.passes} {'pass' if report.passes == 1 else 'passes'}, {report.seconds:.2f} s"
    )
    for why in report.unreadable:
        click.echo(f"{name}: left unchanged: {why}")


def _print_stopped(log: Partition, before: list[SegmentInfo], dry_run: bool, as_json: bool) -> None:
    """Print the progress of an interrupted pass, read from the segments: the pass itself returns no report."""
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
