"""``segmentlog verify`` and ``segmentlog repair``: find damage, and move it to quarantine."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from segmentlog.cli.common import EXIT_DAMAGE, EXIT_DONE, EXIT_UNREADABLE, require_local_folder, say
from segmentlog.cli.dump_command import dump as dump
from segmentlog.cli.option_types import complete_topic, json_option
from segmentlog.errors import UnknownTopic

if TYPE_CHECKING:
    from segmentlog.inspection.finding import Finding, Tally
    from segmentlog.inspection.partition_findings import PartitionFindings
    from segmentlog.log.repair.partition_repair import RepairReport
    from segmentlog.storage.fs import FileSystem

_COLOURS = {"damage": "red", "unreadable": "magenta", "warning": "yellow", "note": "bright_black"}


# ---------------------------------------------------------------- verify


@click.command()
@click.argument("topic", required=False, shell_complete=complete_topic)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Do not print notes, which are harmless.")
@click.option("--strict", is_flag=True, help="Exit with 3 for warnings, too: for any wrong byte, even in a cache.")
@click.pass_context
def verify(ctx: click.Context, topic: str | None, as_json: bool, quiet: bool, strict: bool) -> int:
    """Check every checksum, index and invariant of the store, or of one topic.

    Changes nothing and takes no lock. Works while other processes append, and on a store that does not open. Prints one
    line per finding:

    \b
      damage      bytes differ from what was written, or records are missing without a reason
      unreadable  a batch is as it was written, but its records do not decode: readers stop at it
      warning     a cache is wrong; no record is affected
      note        harmless: remains of a crash, unknown files

    Exits with 3 if there is damage, which 'segmentlog repair' removes. Exits with 4 if the only problem is an
    unreadable batch. A client sent such a batch, so the disk is not at fault; only 'segmentlog repair
    --drop-unreadable' removes it. Indexes are never fsynced, so a power cut may leave warnings although the disk is
    fine.
    """
    from segmentlog.inspection.store_inspection import find_segments_size, inspect_store

    with open_files(ctx, topic) as (fs, path):
        topics = find_topics(fs, path, topic)
        started = time.perf_counter()
        with progress_of_bytes(find_segments_size(fs, path, topics), "verifying") as tally:
            counts = print_findings(inspect_store(path, topic, fs=fs, tally=tally), as_json=as_json, quiet=quiet)
    return print_verdict(counts, tally.counts(), time.perf_counter() - started, strict=strict)


def print_findings(findings: Iterable[Finding], *, as_json: bool, quiet: bool) -> dict[str, int]:
    """Print the findings; return their count by severity."""
    from segmentlog.cli.table_output import show_json

    counts = {"damage": 0, "unreadable": 0, "warning": 0, "note": 0}
    for finding in findings:
        counts[finding.severity] += 1
        if as_json:
            show_json(finding)
        elif not (quiet and finding.severity == "note"):
            click.echo(_format_finding(finding))
    return counts


def print_verdict(
    counts: dict[str, int], tally: tuple[int, int, int, int, int], seconds: float, *, strict: bool
) -> int:
    """Print the amounts checked (in the order of `Tally.counts`) and the verdict; return the exit status."""
    partitions, segments, batches, records, size_bytes = tally
    say(
        f"{partitions:,} partitions, {segments:,} segments, {batches:,} batches,"
        f" {records:,} records, {size_bytes:,} bytes in {seconds:.2f} s"
        f" ({size_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s)"
    )
    say(_verdict(counts))
    if counts["damage"] or (strict and counts["warning"]):
        return EXIT_DAMAGE
    return EXIT_UNREADABLE if counts["unreadable"] else EXIT_DONE


def _verdict(counts: dict[str, int]) -> str:
    names = {"unreadable": "unreadable batch" if counts["unreadable"] == 1 else "unreadable batches"}
    names |= {name: name if counts[name] == 1 else f"{name}s" for name in ("warning", "note")}
    told = [f"{count} {names.get(name, name)}" for name, count in counts.items() if count]
    if counts["damage"]:
        return f"{', '.join(told)}: 'segmentlog repair --dry-run' shows what can be saved"
    if counts["unreadable"]:
        return f"no damage, {', '.join(told)}: 'segmentlog repair --drop-unreadable --dry-run' shows what would be lost"
    return f"no damage ({', '.join(told)})" if told else "no damage"


def _format_finding(finding: Finding) -> str:
    severity, _, rest = str(finding).partition(": ")
    return f"{click.style(severity, fg=_COLOURS[severity], bold=severity == 'damage')}: {rest}"


@contextlib.contextmanager
def open_files(ctx: click.Context, topic: str | None) -> Iterator[tuple[FileSystem, str]]:
    """Yield (file system, path of the store in it) for ``--dir``, with the files of one topic or of all topics."""
    from segmentlog.objects.bucket.url import is_url
    from segmentlog.objects.replica.remote_store import open_store_files

    path = ctx.obj if is_url(ctx.obj) else os.path.abspath(ctx.obj)
    with open_store_files(path, () if topic is None else (topic,)) as found:
        yield found


def find_topics(fs: FileSystem, path: str, topic: str | None) -> list[str]:
    """Return all topics, or only the given one. Raises `UnknownTopic`, `StoreVersionError`."""
    from segmentlog.inspection.store_inspection import list_topics

    names = list_topics(fs, path)
    if topic is None:
        return names
    if topic not in names:
        import difflib

        close = difflib.get_close_matches(topic, names, n=1)
        advice = f"did you mean {close[0]!r}?" if close else "'segmentlog topics' lists the topics"
        raise UnknownTopic(topic, f"it does not exist; {advice}")
    return [topic]


@contextlib.contextmanager
def progress_of_bytes(total_bytes: int, what: str) -> Iterator[Tally]:
    """Yield a tally that moves a progress bar if stderr is a terminal."""
    from segmentlog.inspection.finding import Tally

    if not sys.stderr.isatty():
        yield Tally()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Not redirected: otherwise findings would be printed to stderr.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield Tally(lambda size_bytes: progress.advance(task, size_bytes))


# ---------------------------------------------------------------- repair


@click.command()
@click.argument("topic", required=False, shell_complete=complete_topic)
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--drop-unreadable",
    is_flag=True,
    help="Also remove batches whose checksum is right but whose records do not decode.",
)
@json_option
@click.pass_context
def repair(
    ctx: click.Context, topic: str | None, dry_run: bool, yes: bool, drop_unreadable: bool, as_json: bool
) -> int:  # fmt: skip
    """Remove damaged bytes from the store, or from one topic, and nothing else.

    Damaged bytes are moved to the partition's quarantine folder. Their offsets become a lost range: a reader inside it
    gets an error, other readers skip it, and no new record gets one of these offsets. Indexes and a damaged checkpoint
    are rebuilt.

    An unreadable batch has a right checksum, but its records do not decode: a client sent it like that, and it was
    acknowledged. Repair keeps it, unless --drop-unreadable is given. Run with --dry-run first to see which offsets and
    how many announced records would be lost. To skip such batches without removing them, read with --skip-damaged.

    Other processes may keep using the store; appends wait while a partition is being repaired. Exits with 3 if damage
    remains that cannot be repaired, and with --dry-run if there is any; otherwise with 4 if unreadable batches remain.
    """
    from segmentlog.objects.tier.remote_reader import remote_segments_readable
    from segmentlog.storage.fs import FileSystem

    path = os.path.abspath(require_local_folder(ctx))
    with remote_segments_readable(FileSystem()) as fs:
        return _repair_topics(
            fs, path, topic, dry_run=dry_run, yes=yes, drop_unreadable=drop_unreadable, as_json=as_json
        )


def _repair_topics(
    fs: FileSystem, path: str, topic: str | None, *, dry_run: bool, yes: bool, drop_unreadable: bool, as_json: bool
) -> int:
    """Inspect, print the plan, ask for confirmation, and repair."""
    from segmentlog.inspection.store_inspection import find_segments_size, inspect_partitions
    from segmentlog.log.repair.partition_repair import plan_repair

    topics = find_topics(fs, path, topic)
    now_ms = time.time_ns() // 1_000_000
    planned: list[tuple[PartitionFindings, RepairReport]] = []
    with progress_of_bytes(find_segments_size(fs, path, topics), "scanning") as tally:
        for name in topics:
            for found in inspect_partitions(fs, path, name, tally):
                plan = plan_repair(found, now_ms, drop_unreadable=drop_unreadable)
                if plan.does_anything or found.is_damaged or found.unreadable:
                    planned.append((found, plan))
    to_do = [(found, plan) for found, plan in planned if plan.does_anything]
    left = [found for found, _ in planned]
    if to_do and (dry_run or not yes):
        for found, plan in to_do:
            _print_report(found, plan, as_json=as_json and dry_run, done=False)
    if not to_do:
        say("nothing to repair")
    elif not dry_run:
        if not yes:
            _confirm_repair()
        left = []
        for found, plan in planned:
            if plan.does_anything:
                report = _repair(fs, path, found, drop_unreadable=drop_unreadable)
                _print_report(found, report, as_json=as_json, done=True)
            left.append(_inspect_again(fs, path, found))
    is_planned = dry_run and bool(to_do)
    findings = [finding for found in left for finding in found.findings]
    damage = [finding for finding in findings if finding.severity == "damage"]
    unreadable = [finding for finding in findings if finding.severity == "unreadable"]
    # A dry run has printed the damage with the plan, and unreadable batches that the plan would drop.
    damage_to_print = [] if is_planned else damage
    unreadable_to_print = [] if dry_run and drop_unreadable else unreadable
    status = _print_remaining(fs, path, topics, damage_to_print, unreadable_to_print, as_json)
    if damage:
        return EXIT_DAMAGE
    return status or (EXIT_UNREADABLE if unreadable else EXIT_DONE)


def _confirm_repair() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(
            "repair asks for confirmation, which needs a terminal; add --yes to repair, or --dry-run to see the plan"
        )
    click.confirm("Repair?", abort=True, err=True)


def _repair(fs: FileSystem, path: str, found: PartitionFindings, *, drop_unreadable: bool) -> RepairReport:
    from segmentlog.inspection.small_files import read_topic_file
    from segmentlog.log.repair.partition_repair import repair_partition

    folder = f"{path}/{found.topic}"
    return repair_partition(
        fs, found.folder, found.topic, found.partition, lambda: read_topic_file(fs, folder)[1],
        drop_unreadable=drop_unreadable,
    )  # fmt: skip


def _inspect_again(fs: FileSystem, path: str, found: PartitionFindings) -> PartitionFindings:
    """Inspect the partition again after its repair."""
    from segmentlog.inspection.finding import Tally
    from segmentlog.inspection.partition_inspection import inspect_partition
    from segmentlog.inspection.small_files import read_topic_file

    config = read_topic_file(fs, f"{path}/{found.topic}")[1]
    return inspect_partition(fs, found.folder, found.topic, found.partition, config, Tally())


def _print_remaining(
    fs: FileSystem, path: str, topics: list[str], damage: list[Finding], unreadable: list[Finding], as_json: bool
) -> int:
    """Print damage that a repair cannot remove, and unreadable batches that it kept; return the exit status."""
    from segmentlog.cli.table_output import show_json
    from segmentlog.inspection.small_files import check_store_file
    from segmentlog.inspection.store_inspection import list_partitions

    left = list(check_store_file(fs, path))
    for name in topics:
        left += list_partitions(fs, f"{path}/{name}")[2]
    left = [finding for finding in left if finding.severity == "damage"] + damage
    for finding in left + unreadable:
        if as_json:
            show_json(finding)
        else:
            click.echo(_format_finding(finding))
    if left:
        say(f"{len(left)} findings cannot be repaired; see the list above, and restore from a backup if needed")
    if unreadable:
        say(
            f"{len(unreadable)} unreadable batches were kept; --drop-unreadable removes them, and consumers skip them"
            " with --skip-damaged"
        )
    if left:
        return EXIT_DAMAGE
    return EXIT_UNREADABLE if unreadable else EXIT_DONE


def _print_report(found: PartitionFindings, report: RepairReport, *, as_json: bool, done: bool) -> None:
    if as_json:
        import msgspec

        from segmentlog.cli.table_output import show_json

        show_json({"done": done, "folder": found.folder, **msgspec.structs.asdict(report)})
        return
    name = f"{report.topic}/{report.partition}"
    would = "" if done else "would be "
    for number, cut in enumerate(report.cuts):
        size = cut.end_position - cut.position
        kept_in = f", moved to {report.quarantine[number]}" if number < len(report.quarantine) else ""
        what = "" if cut.record_count is None else f"unreadable batch, {cut.record_count} records by its header: "
        click.echo(
            f"{name}: {size} bytes {would}cut out of {cut.path} at byte {cut.position}: {what}{cut.why}{kept_in}"
        )
    for lost in report.lost:
        click.echo(f"{name}: offsets [{lost.base_offset}, {lost.end_offset}) {would}recorded as lost: {lost.reason}")
    for path in report.indexes:
        click.echo(f"{name}: {path} {would}rebuilt")
    for path in report.caches:
        click.echo(f"{name}: {path} {would}removed: it is wrong, and is rebuilt from the log when needed")
    if report.state:
        click.echo(f"{name}: the state page {would}updated: {report.state}")
    if report.checkpoint:
        click.echo(f"{name}: checkpoint {would}rewritten:  {report.checkpoint}")
    if report.recovery is not None:
        click.echo(f"{name}: recovered: {report.recovery.verdict}: {report.recovery.why}")
    elif not done and (not found.live or found.state.failed):
        click.echo(f"{name}: would then be recovered, as at the next open")
